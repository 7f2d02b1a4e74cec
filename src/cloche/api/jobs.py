"""Jobs, their histories and their logs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse

from cloche.api import files, sse, submit
from cloche.api.answers.jobs import CURSOR, EVENT_STREAM, Events, Job, JobRequest, Jobs
from cloche.api.auth import Member, Reader, scope
from cloche.api.described import answer, both, content, event_stream, json_body
from cloche.api.parameters import JobId
from cloche.api.services import Services, Use
from cloche.api.views import event_view
from cloche.core.blobs import artifacts_key
from cloche.core.errors import BadRequest
from cloche.core.job import State
from cloche.core.queue import Filter
from cloche.core.view import job_view
from cloche.jobs.sandboxes import Opened

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

LOG_BYTES: Final = 1 << 20
_POLL_S: Final = 0.2


@router.post(
    "",
    operation_id="createJob",
    status_code=201,
    responses=answer(Job, 201) | answer(Job),
    openapi_extra=json_body(JobRequest),
)
async def create(request: Request, caller: Member, services: Use) -> JSONResponse:
    """Submit a job. With an `idempotency_key`, a second submit returns the first one's job."""
    submitted = await submit.submit(services, caller, submit.parse(await request.body()))
    return JSONResponse(job_view(submitted.job), 201 if submitted.created else 200)


@router.get("", operation_id="listJobs", responses=answer(Jobs))
async def list_jobs(
    caller: Reader,
    services: Use,
    state: Annotated[list[State] | None, Query(examples=[["queued", "running"]])] = None,
    label: Annotated[
        list[str] | None, Query(description="name=value", examples=[["team=blue"]])
    ] = None,
    cursor: Annotated[str | None, Query(max_length=200, examples=[CURSOR])] = None,
    limit: Annotated[int, Query(ge=1, le=200, examples=[50])] = 50,
) -> dict[str, object]:
    """List jobs, newest first, a page at a time."""
    pairs = [text.partition("=") for text in label or []]
    if any(not name or not mark for name, mark, _ in pairs):
        raise BadRequest("A label is name=value.", remedy="Ask for ?label=team=blue.")
    page = await services.queue.list(
        tenant=scope(caller),
        where=Filter(
            states=frozenset(state or ()), labels={name: value for name, _, value in pairs}
        ),
        cursor=cursor,
        limit=limit,
    )
    return {"jobs": [job_view(job) for job in page.jobs], "next_cursor": page.next_cursor}


@router.get("/{job_id}", operation_id="getJob", responses=answer(Job))
async def get(
    job_id: JobId,
    caller: Reader,
    services: Use,
    wait: Annotated[
        float, Query(ge=0, le=60, description="Seconds to wait for its end.", examples=[10])
    ] = 0,
) -> dict[str, object]:
    """Tell how a job is doing; with `wait`, as soon as it has ended, or after that long."""
    deadline = time.monotonic() + wait
    with services.record.listening(job_id) as news:
        while True:
            job = await services.queue.get(job_id, tenant=scope(caller))
            if job.state.final or time.monotonic() >= deadline:
                return job_view(job)
            await _heard(news)


@router.post("/{job_id}/cancel", operation_id="cancelJob", responses=answer(Job))
async def cancel(job_id: JobId, caller: Member, services: Use) -> dict[str, object]:
    """End a job: its processes are killed and its machine is destroyed."""
    job = await services.queue.cancel(job_id, tenant=scope(caller))
    services.wake()
    await services.access.audit(caller, "job.cancel", job_id)
    return job_view(job)


@router.post(
    "/{job_id}/retry", operation_id="retryJob", status_code=201, responses=answer(Job, 201)
)
async def retry(job_id: JobId, caller: Member, services: Use) -> dict[str, object]:
    """Submit the same request again, as a new job."""
    job = await services.queue.get(job_id, tenant=scope(caller))
    again = job.request.model_copy(update={"idempotency_key": None})
    return job_view((await submit.submit(services, caller, again)).job)


@router.delete("/{job_id}", operation_id="deleteJob", status_code=204)
async def delete(job_id: JobId, caller: Member, services: Use) -> None:
    """Forget a job that is over, with its history and artifacts."""
    await services.queue.delete(job_id, tenant=scope(caller))
    await services.blobs.delete(artifacts_key(job_id))
    await services.access.audit(caller, "job.delete", job_id)


@router.get(
    "/{job_id}/events",
    operation_id="followJob",
    response_model=None,
    responses=both(answer(Events), event_stream(EVENT_STREAM)),
)
async def events(
    request: Request,
    job_id: JobId,
    caller: Reader,
    services: Use,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, examples=[4])] = 0,
    wait: Annotated[
        float, Query(ge=0, le=60, description="Seconds to wait for news.", examples=[10])
    ] = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**31 - 1, examples=[4])] = None,
) -> Response | dict[str, object]:
    """Follow a job's history: server-sent events, or JSON with long polling.

    A stream that broke goes on where it was with `Last-Event-ID`.
    """
    await services.queue.get(job_id, tenant=scope(caller))
    if sse.wanted(request):
        return sse.response(_stream(services, job_id, last_event_id or after))
    deadline = time.monotonic() + wait
    with services.record.listening(job_id) as news:
        while not (found := await services.record.events(job_id, after=after)):
            if time.monotonic() >= deadline:
                break
            await _heard(news)
    return {"events": [event_view(event) for event in found]}


async def _stream(services: Services, job_id: str, after: int) -> AsyncGenerator[str, None]:
    with services.record.listening(job_id) as news:
        while True:
            for event in await services.record.events(job_id, after=after, limit=100):
                after = event.seq
                yield sse.line(event.kind, event_view(event), event.seq)
                if event.kind == "finished":
                    return
            await _heard(news)


async def _heard(news: asyncio.Event) -> None:
    """Wait for news, or for so long that another server may have some."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_POLL_S):
            await news.wait()
    news.clear()


@router.get(
    "/{job_id}/logs",
    operation_id="readJobLogs",
    response_class=Response,
    responses=content("text/plain; charset=utf-8", "42\n", schema={"type": "string"}),
)
async def logs(
    job_id: JobId,
    caller: Reader,
    services: Use,
    offset: Annotated[int, Query(ge=0, le=2**62, examples=[0])] = 0,
    limit: Annotated[int, Query(ge=1, le=LOG_BYTES, examples=[65536])] = LOG_BYTES,
) -> Response:
    """Read what the job has written, from any byte; `X-Log-Size` tells how much there is."""
    await services.queue.get(job_id, tenant=scope(caller))
    data = await services.record.log(job_id, offset=offset, limit=limit)
    size = await services.record.log_size(job_id)
    headers = {"x-log-size": str(size), "x-content-type-options": "nosniff"}
    return Response(data, headers=headers, media_type="text/plain; charset=utf-8")


async def to_read(job_id: JobId, caller: Reader, services: Use) -> AsyncIterator[Opened]:
    async with services.sandboxes.use_of_job(job_id, scope(caller)) as opened:
        yield opened


async def to_change(job_id: JobId, caller: Member, services: Use) -> AsyncIterator[Opened]:
    async with services.sandboxes.use_of_job(job_id, scope(caller)) as opened:
        yield opened


files.add_routes(
    router, "/{job_id}", of="Job", to_read=Depends(to_read), to_change=Depends(to_change)
)
