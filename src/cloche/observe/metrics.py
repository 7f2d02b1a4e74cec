"""The numbers of one server process, as Prometheus reads them.

No label has more values than the program has words for: no path, job or tenant is one.
Every metric is described in docs/how-to/observe.md.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import prometheus_client as prometheus

from cloche.core.errors import StoreUnavailable
from cloche.core.job import Job, Reason, State
from cloche.core.meters import Start

logger = logging.getLogger(__name__)

_WAITS_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_RUNS_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600)
_STARTS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ANSWERS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
_METHODS: Final = frozenset("GET HEAD POST PUT PATCH DELETE OPTIONS".split())
_STATE_OF: Final = {Reason.DONE: State.SUCCEEDED, Reason.CANCELLED: State.CANCELLED}


class Metrics:
    """`cloche.core.meters.Meters`, and what only a scrape asks for."""

    def __init__(self, *, version: str, rung: str) -> None:
        # The moment at which each series began would double what a scrape carries.
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        about = prometheus.Info("cloche", "The server's version and rung.", registry=registry)
        about.info({"version": version, "rung": rung})
        self._jobs = prometheus.Gauge(
            "cloche_jobs", "Jobs in the store, by state.", ["state"], registry=registry
        )
        self._machines = prometheus.Gauge(
            "cloche_machines", "Machines of this server, by use.", ["use"], registry=registry
        )
        self._waits = prometheus.Histogram(
            "cloche_job_wait_seconds",
            "From a job's submission to its first start.",
            registry=registry,
            buckets=_WAITS_S,
        )
        self._runs = prometheus.Histogram(
            "cloche_job_run_seconds",
            "From a job's first start to its end.",
            ["state"],
            registry=registry,
            buckets=_RUNS_S,
        )
        self._finished = prometheus.Counter(
            "cloche_jobs_finished", "Jobs that ended here.", ["state", "reason"], registry=registry
        )
        self._starts = prometheus.Histogram(
            "cloche_machine_start_seconds",
            "From wanting a machine to having one.",
            ["start"],
            registry=registry,
            buckets=_STARTS_S,
        )
        self._pool_failures = prometheus.Counter(
            "cloche_pool_failures",
            "Times the pool could not start a machine.",
            registry=registry,
        )
        self._store_errors = prometheus.Counter(
            "cloche_store_errors", "Times the database did not answer.", registry=registry
        )
        self._requests = prometheus.Counter(
            "cloche_http_requests",
            "Requests answered.",
            ["route", "method", "status"],
            registry=registry,
        )
        self._answers = prometheus.Histogram(
            "cloche_http_request_seconds",
            "From a request to the beginning of its answer.",
            ["route", "method"],
            registry=registry,
            buckets=_ANSWERS_S,
        )
        for reason in Reason:  # A rate needs a zero to rise from.
            self._finished.labels(_STATE_OF.get(reason, State.FAILED), reason)

    def job_started(self, job: Job) -> None:
        if job.attempt == 1 and job.started_at is not None:
            self._waits.observe((job.started_at - job.created_at).total_seconds())

    def job_finished(self, job: Job) -> None:
        self._finished.labels(job.state, job.reason).inc()
        if job.started_at is not None and job.finished_at is not None:
            ran = job.finished_at - job.started_at
            self._runs.labels(job.state).observe(ran.total_seconds())

    def machine_ready(self, start: Start, seconds: float) -> None:
        self._starts.labels(start).observe(seconds)

    def pool_failed(self) -> None:
        self._pool_failures.inc()

    def store_failed(self) -> None:
        self._store_errors.inc()

    def request_answered(self, route: str, method: str, status: int, seconds: float) -> None:
        known = method if method in _METHODS else "other"
        self._requests.labels(route, known, status).inc()
        self._answers.labels(route, known).observe(seconds)

    def watch_machines(self, use: str, count: Callable[[], int]) -> None:
        """Have `count` tell, at each scrape, how many machines are in this use."""
        self._machines.labels(use).set_function(count)

    async def scrape(self, counts: Callable[[], Awaitable[Mapping[State, int]]]) -> bytes:
        """Spell every number, in Prometheus's text format."""
        try:
            for state, count in (await counts()).items():
                self._jobs.labels(state).set(count)
        except StoreUnavailable as error:
            logger.warning("metrics: %s The rest is told.", error)
            self._jobs.clear()  # What was true once is not told as if it still were.
        return prometheus.generate_latest(self.registry)
