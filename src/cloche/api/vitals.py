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
    pool_ready: Callable[[], int]
    worker_looked_at: Callable[[], float]
    """When, on the monotonic clock, the worker last looked at the queue."""
