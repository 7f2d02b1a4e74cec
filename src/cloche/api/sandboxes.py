"""Sandboxes without a job: make one, look at it, pause it, keep it, end it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Depends, Query

from cloche.api import files, processes
from cloche.api.answers.sandboxes import Sandbox, Sandboxes
from cloche.api.auth import Member, Reader, scope
from cloche.api.described import answer, example
from cloche.api.parameters import SandboxId
from cloche.api.services import Use
from cloche.api.views import sandbox_view
from cloche.core.errors import NoSuchSandbox, SandboxElsewhere
from cloche.core.job import Seconds, Value
from cloche.core.standing import Order
from cloche.jobs.sandboxes import Opened

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])

_ORDERS: Final = {
    "plain": {"value": {}},
    "sized": {
        "value": {
            "limits": {"vcpus": 2, "memory_mib": 2048},
            "env": {"COLOUR": "blue"},
            "labels": {"team": "blue"},
            "ttl_s": 3600,
            "idle_s": 600,
        }
    },
}
Wanted = Annotated[Order, Body(openapi_examples=_ORDERS)]


class KeepAlive(Value):
    """How much longer a sandbox is wanted."""

    model_config = example({"ttl_s": 7200})

    ttl_s: Seconds = 3600


async def to_read(sandbox_id: SandboxId, caller: Reader, services: Use) -> AsyncIterator[Opened]:
    async with services.sandboxes.use(sandbox_id, scope(caller)) as opened:
        yield opened


async def to_change(sandbox_id: SandboxId, caller: Member, services: Use) -> AsyncIterator[Opened]:
    async with services.sandboxes.use(sandbox_id, scope(caller)) as opened:
        yield opened


@router.post("", operation_id="createSandbox", status_code=201, responses=answer(Sandbox, 201))
async def create(order: Wanted, caller: Member, services: Use) -> dict[str, Any]:
    """Make a sandbox. It ends `ttl_s` from now, or when nobody uses it for `idle_s`."""
    standing = await services.sandboxes.create(caller.tenant, order)
    await services.access.audit(caller, "sandbox.create", standing.id)
    return sandbox_view(standing)


@router.get("", operation_id="listSandboxes", responses=answer(Sandboxes))
async def list_sandboxes(
    caller: Reader,
    services: Use,
    ended: Annotated[
        bool, Query(description="Also those that are no more.", examples=[True])
    ] = False,
    limit: Annotated[int, Query(ge=1, le=1000, examples=[200])] = 200,
) -> dict[str, Any]:
    """List sandboxes, newest first."""
    found = await services.standings.list(tenant=scope(caller), ended=ended, limit=limit)
    return {"sandboxes": [sandbox_view(standing) for standing in found]}


@router.get("/{sandbox_id}", operation_id="getSandbox", responses=answer(Sandbox))
async def get(sandbox_id: SandboxId, caller: Reader, services: Use) -> dict[str, Any]:
    """Tell how a sandbox is, and what it has used as its host counts it."""
    view = sandbox_view(await services.standings.get(sandbox_id, tenant=scope(caller)))
    try:
        usage = await services.sandboxes.usage(sandbox_id, scope(caller))
    except (NoSuchSandbox, SandboxElsewhere):
        return view
    return {**view, "usage": usage}


@router.post("/{sandbox_id}/keep-alive", operation_id="keepSandboxAlive", responses=answer(Sandbox))
async def keep_alive(
    sandbox_id: SandboxId, wanted: KeepAlive, caller: Member, services: Use
) -> dict[str, Any]:
    """Let a sandbox stand for `ttl_s` from now, longer or shorter than before."""
    return sandbox_view(await services.sandboxes.extend(sandbox_id, scope(caller), wanted.ttl_s))


@router.post("/{sandbox_id}/pause", operation_id="pauseSandbox", responses=answer(Sandbox))
async def pause(sandbox_id: SandboxId, caller: Member, services: Use) -> dict[str, Any]:
    """Stop every process where it stands; the memory stays. Its time runs on."""
    standing = await services.sandboxes.pause(sandbox_id, scope(caller))
    await services.access.audit(caller, "sandbox.pause", sandbox_id)
    return sandbox_view(standing)


@router.post("/{sandbox_id}/resume", operation_id="resumeSandbox", responses=answer(Sandbox))
async def resume(sandbox_id: SandboxId, caller: Member, services: Use) -> dict[str, Any]:
    """Let a paused sandbox go on."""
    standing = await services.sandboxes.resume(sandbox_id, scope(caller))
    await services.access.audit(caller, "sandbox.resume", sandbox_id)
    return sandbox_view(standing)


@router.delete("/{sandbox_id}", operation_id="deleteSandbox", status_code=204)
async def delete(sandbox_id: SandboxId, caller: Member, services: Use) -> None:
    """Destroy a sandbox and all that runs in it. Nothing of it is left."""
    await services.sandboxes.delete(sandbox_id, scope(caller))
    await services.access.audit(caller, "sandbox.delete", sandbox_id)


processes.add_routes(
    router, "/{sandbox_id}", to_read=Depends(to_read), to_change=Depends(to_change)
)
files.add_routes(
    router, "/{sandbox_id}", of="Sandbox", to_read=Depends(to_read), to_change=Depends(to_change)
)
