"""What was told to receivers of webhooks, and what they verify it with."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from cloche.api.answers.webhooks import Deliveries, WebhookSecret
from cloche.api.auth import Admin, Reader, scope
from cloche.api.described import answer
from cloche.api.parameters import JobId
from cloche.api.services import Use
from cloche.core.outbox import Delivery
from cloche.core.view import moment

router = APIRouter(prefix="/v1", tags=["webhooks"])


@router.get(
    "/jobs/{job_id}/deliveries", operation_id="listDeliveries", responses=answer(Deliveries)
)
async def deliveries(job_id: JobId, caller: Reader, services: Use) -> dict[str, Any]:
    """Tell what was sent to the job's webhook, how often, and what came of it."""
    await services.queue.get(job_id, tenant=scope(caller))
    found = await services.outbox.of_job(job_id)
    return {"deliveries": [_view(delivery) for delivery in found]}


@router.get("/webhooks/secret", operation_id="getWebhookSecret", responses=answer(WebhookSecret))
async def secret(caller: Admin, services: Use, response: Response) -> dict[str, str]:
    """Return what every webhook of this server is signed with."""
    await services.access.audit(caller, "webhooks.secret", "")
    response.headers["cache-control"] = "no-store"
    return {"secret": services.webhook_secret}


def _view(delivery: Delivery) -> dict[str, Any]:
    return {
        "id": delivery.id,
        "type": f"job.{delivery.event}",
        "url": delivery.url,
        "state": delivery.state,
        "attempts": delivery.attempts,
        "created_at": moment(delivery.created_at),
        "last_at": moment(delivery.last_at),
        "next_at": moment(delivery.next_at),
        "last_error": delivery.last_error or None,
    }
