"""What the routes work with, put together by the composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from cloche.api.vitals import Vitals
from cloche.core.access import Access
from cloche.core.queue import Queue
from cloche.core.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts a route may use."""

    queue: Queue
    record: Record
    access: Access
    artifacts_of: Callable[[str], Path]
    wake: Callable[[], None]
    """Tell a worker in this process to look at the queue now."""
    rung: str
    vitals: Vitals
    api_key: str | None = None
    """A key from the environment that opens everything."""
    authenticate: bool = True
    hosts: frozenset[str] = frozenset()
    """Names this server answers to, besides loopback's."""


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


Use = Annotated[Services, Depends(services)]
