"""What the routes work with, put together by the composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from cloche.api.gate import Gate
from cloche.api.vitals import Vitals
from cloche.core.access import Access
from cloche.core.addresses import Rules
from cloche.core.blobs import Blobs
from cloche.core.outbox import Outbox
from cloche.core.queue import Queue
from cloche.core.quota import Quotas
from cloche.core.record import Record
from cloche.core.session import Sessions
from cloche.core.standing import Standings
from cloche.core.uploads import Uploads
from cloche.jobs.sandboxes import Sandboxes


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts a route may use."""

    queue: Queue
    record: Record
    access: Access
    quotas: Quotas
    sessions: Sessions
    standings: Standings
    sandboxes: Sandboxes
    outbox: Outbox
    blobs: Blobs
    uploads: Uploads
    wake: Callable[[], None]
    """Tell a worker in this process to look at the queue now."""
    rung: str | None
    """Of its machines; None when it has none."""
    vitals: Vitals
    api_key: str | None = None
    """A key from the environment that opens everything."""
    authenticate: bool = True
    webhook_secret: str = ""
    """What webhooks are signed with."""
    addresses: Rules = field(default_factory=Rules)
    """Where webhooks may be sent."""
    presets: frozenset[str] = frozenset()
    """Names that the operator gave to lists of hosts, for `network`."""
    max_wall_s: float | None = None
    """The most that a job may ask for."""
    max_upload_bytes: int = 2048 << 20
    hosts: frozenset[str] = frozenset()
    """Names this server answers to, besides loopback's."""
    gate: Gate = field(default_factory=Gate)


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


Use = Annotated[Services, Depends(services)]
