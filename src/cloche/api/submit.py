"""Takes a job in, whichever dialect it comes in."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from cloche.api import problems
from cloche.api.auth import scope
from cloche.api.services import Services
from cloche.core import about, tracing
from cloche.core.access import Caller
from cloche.core.addresses import literal
from cloche.core.errors import AgentMissing, BadRequest, JobNotOver
from cloche.core.job import Request
from cloche.core.network import check_presets
from cloche.core.queue import Submitted
from cloche.core.webhook import Webhook, parse_url
from cloche.jobs.steps import decode

logger = logging.getLogger(__name__)


def parse(raw: bytes) -> Request:
    """Read a job from JSON.

    Raises:
        BadRequest: which field is wrong, and how.
    """
    try:
        return Request.model_validate_json(raw)
    except ValidationError as error:
        raise problems.bad_body(error) from None


def parse_task(raw: bytes) -> Request:
    """Read a task from plain text.

    Raises:
        BadRequest: it is empty, too long, or not text.
    """
    try:
        return Request(task=raw.decode().strip())
    except UnicodeDecodeError:
        raise BadRequest("The task is not UTF-8 text.", remedy="Send it as UTF-8.") from None
    except ValidationError as error:
        raise problems.bad_body(error) from None


async def submit(services: Services, caller: Caller, request: Request) -> Submitted:
    if request.task is not None:
        raise AgentMissing(
            "A task in plain words needs an agent, and this version has none yet.",
            remedy="Send code (`kind` and `code`) or `steps` instead.",
        )
    request = allowed(services, request)
    await _check_inputs(services, caller, request)
    submitted = await services.queue.submit(
        caller.tenant, request, by=caller, traceparent=tracing.traceparent()
    )
    services.wake()
    about.note(job_id=submitted.job.id)
    if submitted.created:
        logger.info("job %s: accepted", submitted.job.id)
    return submitted


async def _check_inputs(services: Services, caller: Caller, request: Request) -> None:
    """Refuse files that are not there, or not the caller's.

    Raises:
        NoSuchUpload, NoSuchJob: which one.
        JobNotOver: the job has left nothing yet.
        BadRequest: the content is not in its encoding.
    """
    for given in request.files:
        if given.content is not None:
            decode(given.content, given.encoding, given.path)
        elif given.upload is not None:
            await services.uploads.get(given.upload, scope(caller))
        elif given.job is not None:
            job = await services.queue.get(given.job, tenant=scope(caller))
            if not job.state.final:
                raise JobNotOver(
                    f"Job {given.job} is {job.state}: what it leaves is not known yet.",
                    remedy="Submit this once that one has ended.",
                )


def allowed(services: Services, request: Request) -> Request:
    """Return the request within what the operator allows.

    Raises:
        BadRequest: it asks for more.
    """
    if request.webhook is not None:
        _check_receiver(services, request.webhook)
    check_presets(request.network, services.presets)
    longest, limits = services.max_wall_s, request.limits
    if longest is None or limits.wall_s <= longest:
        return request
    if "wall_s" in limits.model_fields_set:
        raise BadRequest(
            f"limits.wall_s is {limits.wall_s:g}; this server allows {longest:g}.",
            remedy="Ask for less, or leave it out for the most that is allowed.",
        )
    clipped = limits.model_copy(update={"wall_s": longest})
    return request.model_copy(update={"limits": clipped})


def _check_receiver(services: Services, webhook: Webhook) -> None:
    """Refuse what can be told at once; where a name leads is looked at when it is called."""
    address = literal(parse_url(webhook.url).host or "")
    if address is not None and not services.addresses.permit(address):
        raise BadRequest(
            "webhook.url leads to an address that is not public.",
            remedy="Use a public one, or have the operator add it to CLOCHE_ALLOW_ADDRESSES.",
        )
