"""What a job's machine connected to, and what it was refused."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from cloche.api.answers.connections import Connections
from cloche.api.auth import Reader, scope
from cloche.api.described import answer
from cloche.api.parameters import JobId
from cloche.api.services import Use

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_PAGE = 1000
"""Attempts in one answer, about."""


@router.get("/{job_id}/network", operation_id="listConnections", responses=answer(Connections))
async def attempts(
    job_id: JobId,
    caller: Reader,
    services: Use,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, examples=[0])] = 0,
) -> dict[str, object]:
    """List connections, oldest first; `next_after` is where the list goes on."""
    await services.queue.get(job_id, tenant=scope(caller))
    found: list[dict[str, Any]] = []
    left_out = 0
    while len(found) < _PAGE:
        events = await services.record.events(job_id, after=after, data=False)
        if not events:
            return {"attempts": found, "left_out": left_out, "next_after": None}
        for event in events:
            after = event.seq
            if event.kind == "network":
                found += event.body["attempts"]
                left_out += event.body["left_out"]
                if len(found) >= _PAGE:
                    break
    return {"attempts": found, "left_out": left_out, "next_after": after}
