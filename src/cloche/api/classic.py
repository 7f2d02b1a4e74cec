"""The classic dialect: schedule, submit, status, in the words its clients read."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from cloche.api import submit
from cloche.api.answers.jobs import ID, REQUESTS, ClassicStatus, Scheduled
from cloche.api.auth import Member, Reader, scope
from cloche.api.described import answer
from cloche.api.parameters import JobId
from cloche.api.services import Services, Use
from cloche.api.views import TAIL_BYTES, classic_view
from cloche.core.access import Caller
from cloche.core.errors import BadRequest

router = APIRouter(tags=["classic"])

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/JobRequest"},
                "examples": {name: {"value": value} for name, value in REQUESTS.items()},
            },
            "text/plain": {"schema": {"type": "string"}, "example": "Build me a todo app"},
        },
    }
}


@router.post(
    "/schedule", operation_id="scheduleJob", responses=answer(Scheduled), openapi_extra=_BODY
)
@router.post("/submit", operation_id="submitJob", responses=answer(Scheduled), openapi_extra=_BODY)
async def schedule(request: Request, caller: Member, services: Use) -> dict[str, str]:
    """Schedule a job: a task in words, `kind` and `code`, or `steps`."""
    raw = await request.body()
    if request.headers.get("content-type", "").startswith("text/plain"):
        wanted = submit.parse_task(raw)
    else:
        wanted = submit.parse(raw)
    job = (await submit.submit(services, caller, wanted)).job
    return {"job_id": job.id, "task_id": job.id}


@router.get("/status/{job_id}", operation_id="getStatus", responses=answer(ClassicStatus))
async def status(job_id: JobId, caller: Reader, services: Use) -> dict[str, object]:
    """Tell how a job is doing, with the end of its output."""
    return await _status(job_id, caller, services)


@router.get("/status", operation_id="getStatusByQuery", responses=answer(ClassicStatus))
async def status_by_query(
    caller: Reader,
    services: Use,
    task_id: Annotated[str | None, Query(examples=[ID])] = None,
    job_id: Annotated[str | None, Query(examples=[ID])] = None,
) -> dict[str, object]:
    """Tell how a job is doing, to clients that send its id as `task_id`."""
    wanted = task_id or job_id
    if not wanted:
        raise BadRequest("task_id is missing.", remedy="Ask for /status?task_id=ID.")
    return await _status(wanted, caller, services)


async def _status(job_id: str, caller: Caller, services: Services) -> dict[str, object]:
    job = await services.queue.get(job_id, tenant=scope(caller))
    tails = await services.record.tails(job_id, limit=TAIL_BYTES)
    return classic_view(
        job, *(tails[name].decode(errors="replace") for name in ("stdout", "stderr"))
    )
