"""What jobs leave behind: all of it as a zip, or one file out of it, never held in memory."""

from __future__ import annotations

import asyncio
import zipfile
from collections.abc import AsyncIterator
from typing import IO, Annotated, Final

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import StreamingResponse

from cloche.api import ranges
from cloche.api.answers.jobs import Artifacts
from cloche.api.auth import Reader, scope
from cloche.api.described import answer, content
from cloche.api.parameters import JobId
from cloche.api.services import Services, Use
from cloche.core.access import Caller
from cloche.core.blobs import Blob, artifacts_key
from cloche.core.errors import NoSuchFile, StoreUnavailable

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_PIECE_BYTES: Final = 1 << 20
_EMPTY_ZIP: Final = b"PK\x05\x06" + bytes(18)
# Never shown as a page of ours: its content is anyone's.
_HEADERS: Final = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}


@router.get("/{job_id}/artifacts", operation_id="listArtifacts", responses=answer(Artifacts))
async def artifacts(job_id: JobId, caller: Reader, services: Use) -> dict[str, object]:
    """List what the job left behind."""
    blob = await _zip_of(job_id, caller, services)
    if blob is None:
        return {"files": []}
    zipped = await asyncio.to_thread(_open, services, blob)
    return {
        "files": [{"path": info.filename, "size": info.file_size} for info in zipped.infolist()]
    }


@router.head("/{job_id}/artifacts.zip", response_class=Response, include_in_schema=False)
@router.get(
    "/{job_id}/artifacts.zip",
    operation_id="downloadArtifacts",
    response_class=Response,
    responses=content("application/zip", "PK\x03\x04..."),
)
async def artifacts_zip(request: Request, job_id: JobId, caller: Reader, services: Use) -> Response:
    """Download all that the job left behind. Ranges are answered."""
    blob = await _zip_of(job_id, caller, services)
    headers = {
        **_HEADERS,
        "content-type": "application/zip",
        "content-disposition": f'attachment; filename="{job_id}.zip"',
    }
    if blob is None:
        size = len(_EMPTY_ZIP)
        return ranges.answer(request, _empty_zip, size=size, tag="empty", headers=headers)
    return ranges.answer(
        request,
        lambda start, stop: services.blobs.read(blob, start, stop),
        size=blob.size,
        tag=blob.tag,
        headers=headers,
    )


@router.get(
    "/{job_id}/artifacts/{path:path}",
    operation_id="downloadArtifact",
    response_class=Response,
    responses=content("application/octet-stream", "hello\n"),
)
async def artifact(
    job_id: JobId,
    path: Annotated[str, Path(examples=["hello.txt"])],
    caller: Reader,
    services: Use,
) -> Response:
    """Download one file that the job left behind."""
    blob = await _zip_of(job_id, caller, services)
    try:
        if blob is None:
            raise KeyError(path)
        zipped = await asyncio.to_thread(_open, services, blob)
        about = zipped.getinfo(path)
        member = await asyncio.to_thread(zipped.open, about)
    except KeyError:
        raise NoSuchFile(
            "The job left no such file.", remedy=f"List them at /v1/jobs/{job_id}/artifacts."
        ) from None
    headers = {**_HEADERS, "content-length": str(about.file_size)}
    return StreamingResponse(
        _pieces(member), headers=headers, media_type="application/octet-stream"
    )


async def _zip_of(job_id: str, caller: Caller, services: Services) -> Blob | None:
    job = await services.queue.get(job_id, tenant=scope(caller))
    return await services.blobs.find(artifacts_key(job.id))


def _open(services: Services, blob: Blob) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(services.blobs.open(blob))
    except zipfile.BadZipFile as error:
        raise StoreUnavailable(
            f"What is kept of the job is damaged: {error}.", remedy="Run the job again."
        ) from error


async def _empty_zip(start: int, stop: int) -> AsyncIterator[bytes]:
    yield _EMPTY_ZIP[start:stop]


async def _pieces(member: IO[bytes]) -> AsyncIterator[bytes]:
    # Nothing needs closing: an opened blob holds no descriptor. And a thread may yet be reading
    # when a caller who went away ends this.
    while data := await asyncio.to_thread(member.read, _PIECE_BYTES):
        yield data
