"""How the server is, as far as its own process can tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cloche.core.meters import Meters
from cloche.jobs.census import Census


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What health and metrics are told from."""

    census: Census
    meters: Meters
    scrape: Callable[[], Awaitable[bytes]]
    """Spell every metric, in Prometheus's text format."""
    pool_ready: Callable[[], int] | None = None
    """None when the server has no machines."""
    worker_looked_at: Callable[[], float] | None = None
    """When, on the monotonic clock, the worker in this process last looked at the queue."""
