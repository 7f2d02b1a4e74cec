"""Keys, and the record of their use: for admins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from cloche.api.answers import access as answers
from cloche.api.answers.access import Audit, CreatedKey, Keys
from cloche.api.auth import Admin
from cloche.api.described import answer, example
from cloche.api.parameters import KeyId
from cloche.api.services import Use
from cloche.core.access import Key, Role

router = APIRouter(prefix="/v1", tags=["admin"])

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.\-]+$")]


class NewKey(BaseModel):
    """What a key is for."""

    model_config = ConfigDict(
        extra="forbid", **example({"tenant": "acme", "role": "member", "name": "ci"})
    )

    tenant: Name = "default"
    role: Role = Role.MEMBER
    name: Annotated[str, Field(max_length=128)] = ""


@router.post("/keys", operation_id="createKey", status_code=201, responses=answer(CreatedKey, 201))
async def create(wanted: NewKey, caller: Admin, services: Use) -> dict[str, Any]:
    """Make a key. Its secret is in this answer, and never again."""
    key, secret = await services.access.create_key(
        tenant=wanted.tenant, role=wanted.role, name=wanted.name
    )
    await services.access.audit(caller, "key.create", key.id, tenant=key.tenant, role=key.role)
    return {**_view(key), "key": secret}


@router.get("/keys", operation_id="listKeys", responses=answer(Keys))
async def list_keys(caller: Admin, services: Use) -> dict[str, Any]:
    """List every key."""
    return {"keys": [_view(key) for key in await services.access.keys()]}


@router.delete("/keys/{key_id}", operation_id="revokeKey", responses=answer(answers.Key))
async def revoke(key_id: KeyId, caller: Admin, services: Use) -> dict[str, Any]:
    """Make a key useless from now on."""
    key = await services.access.revoke(key_id)
    await services.access.audit(caller, "key.revoke", key_id)
    return _view(key)


@router.get("/audit", operation_id="readAudit", responses=answer(Audit))
async def audit(
    caller: Admin,
    services: Use,
    limit: Annotated[int, Query(ge=1, le=1000, examples=[100])] = 100,
) -> dict[str, Any]:
    """Tell who did what, newest first."""
    entries = await services.access.audit_log(limit=limit)
    return {
        "entries": [
            {
                "at": entry.at.isoformat(),
                "key_id": entry.key_id,
                "tenant": entry.tenant,
                "action": entry.action,
                "target": entry.target,
                "detail": entry.detail,
            }
            for entry in entries
        ]
    }


def _view(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "role": key.role,
        "name": key.name,
        "created_at": key.created_at.isoformat(),
        "revoked_at": key.revoked_at.isoformat() if key.revoked_at else None,
    }
