"""What is to be told to receivers of webhooks: written with the change itself, sent until heard.

A delivery is stored in the transaction that changes the job, so that there is one for
every change and none for a change that did not happen, whenever a server is killed.
"""

from __future__ import annotations

import enum
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Protocol

from cloche.core.job import Job
from cloche.core.view import job_view, moment
from cloche.core.webhook import Event, parse_url

_KEPT_BACK: Final = frozenset({"code", "steps", "env"})
"""What was run, and with which secrets, is nothing that a receiver has to know."""


class Fate(enum.StrEnum):
    """What became of a delivery."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    """Given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Something to be told to one receiver."""

    id: str
    """The same each time it is sent: a receiver that heard it before can tell."""
    job_id: str
    tenant: str
    url: str
    event: str
    body: str
    created_at: datetime
    state: Fate = Fate.PENDING
    attempts: int = 0
    last_at: datetime | None = None
    """When it was last sent."""
    next_at: datetime | None = None
    """When it is sent next, while it is pending."""
    last_error: str = ""

    @property
    def receiver(self) -> str:
        """Whose answer is waited for: however many paths it has, it is slow as one."""
        url = parse_url(self.url)
        return f"{url.host}:{url.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How one try to deliver went."""

    at: datetime
    state: Fate
    next_at: datetime | None = None
    error: str = ""


def announce(job: Job, event: Event, now: datetime) -> Delivery | None:
    """Return what is to be told of `job`, or None when nobody wants to know."""
    webhook = job.request.webhook
    if webhook is None or event not in webhook.events:
        return None
    delivery_id = f"msg_{secrets.token_hex(12)}"
    view = job_view(job)
    request = {name: value for name, value in view["request"].items() if name not in _KEPT_BACK}
    body = {
        "id": delivery_id,
        "type": f"job.{event}",
        "created_at": moment(now),
        "job": {**view, "request": request},
    }
    return Delivery(
        id=delivery_id,
        job_id=job.id,
        tenant=job.tenant,
        url=webhook.url,
        event=event,
        body=json.dumps(body),
        created_at=now,
        next_at=now,
    )


class Outbox(Protocol):
    """Deliveries that outlive every process. One server sends one at a time, by a lease.

    The queue puts them in. Every call may raise `StoreUnavailable`.
    """

    async def claim(
        self, owner: str, *, lease: timedelta, limit: int, per_receiver: int, per_tenant: int
    ) -> Sequence[Delivery]:
        """Take up to `limit` deliveries that are due, and hold them for `lease`.

        No receiver and no tenant has more than its share under way at once, on all
        servers together: one that does not answer holds up nobody else.
        """
        ...

    async def settle(self, owner: str, delivery_id: str, attempt: Attempt) -> None:
        """Note how a try went, and let go; nothing happens to one that is not held."""
        ...

    async def reclaim(self, owner: str) -> None:
        """Let go of what an earlier process of the same name held, or this one leaves."""
        ...

    async def of_job(self, job_id: str) -> Sequence[Delivery]:
        """Return a job's deliveries, oldest first."""
        ...

    async def secret(self, proposed: str) -> str:
        """Return what every server on this database signs with; `proposed`, if there is none."""
        ...
