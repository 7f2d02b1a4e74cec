"""Files sent ahead of the jobs that need them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect

from cloche.api.answers import uploads as answers
from cloche.api.auth import Member, Reader, scope
from cloche.api.described import answer, bytes_body
from cloche.api.parameters import UploadId
from cloche.api.services import Use
from cloche.core.blobs import upload_key
from cloche.core.errors import BadRequest
from cloche.core.uploads import Upload

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])


@router.post(
    "",
    operation_id="createUpload",
    status_code=201,
    responses=answer(answers.Upload, 201),
    openapi_extra=bytes_body("hello world"),
)
async def create(request: Request, caller: Member, services: Use) -> dict[str, Any]:
    """Keep the request's body, whatever it is, for jobs to use."""
    told = request.headers.get("content-length", "")
    await services.uploads.check_room(caller.tenant, int(told) if told.isdecimal() else 0)
    upload_id = secrets.token_hex(16)
    body = _Measured(request.stream())
    key = upload_key(upload_id)
    try:
        await services.blobs.put(key, body.pieces())
    except ClientDisconnect:
        raise BadRequest("The upload broke off.", remedy="Send it again.") from None
    upload = Upload(
        id=upload_id,
        tenant=caller.tenant,
        size=body.size,
        sha256=body.sha256.hexdigest(),
        created_at=datetime.now(UTC),
    )
    try:
        await services.uploads.add(upload)
    except BaseException:
        await services.blobs.delete(key)
        raise
    await services.access.audit(caller, "upload.create", upload_id, size=upload.size)
    return _view(upload)


@router.get("/{upload_id}", operation_id="getUpload", responses=answer(answers.Upload))
async def get(upload_id: UploadId, caller: Reader, services: Use) -> dict[str, Any]:
    """Tell what is known of an upload."""
    return _view(await services.uploads.get(upload_id, scope(caller)))


@router.delete("/{upload_id}", operation_id="deleteUpload", status_code=204)
async def delete(upload_id: UploadId, caller: Member, services: Use) -> None:
    """Forget an upload."""
    gone = await services.uploads.delete(upload_id, scope(caller))
    await services.blobs.delete(upload_key(gone.id))
    await services.access.audit(caller, "upload.delete", gone.id)


class _Measured:
    """A stream, counted and hashed as it passes."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self.size = 0
        self.sha256 = hashlib.sha256()

    async def pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self.size += len(piece)
            self.sha256.update(piece)
            yield piece


def _view(upload: Upload) -> dict[str, Any]:
    return {
        "id": upload.id,
        "tenant": upload.tenant,
        "size": upload.size,
        "sha256": upload.sha256,
        "created_at": upload.created_at.isoformat(),
    }
