"""The durable queue of jobs, as workers and the API see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from cloche.core.access import Caller
from cloche.core.job import Job, Outcome, Request, State
from cloche.core.record import Entry
from cloche.core.rung import Rung


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job, and whether this submit made it or an earlier one with the same key did."""

    job: Job
    created: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some jobs, newest first, and where the next page starts."""

    jobs: tuple[Job, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs to list. Empty means all."""

    states: frozenset[State] = frozenset()
    labels: Mapping[str, str] | None = None


class Queue(Protocol):
    """Jobs that outlive every process. One worker holds a job at a time, by a lease.

    Every call may raise `StoreUnavailable`: the database cannot be reached.
    """

    async def submit(
        self,
        tenant: str,
        request: Request,
        *,
        by: Caller | None = None,
        traceparent: str = "",
    ) -> Submitted:
        """Accept a job; when this returns, it is never lost. `by` goes into the audit log.

        Its history tells `traceparent`: the span of whoever asked for it.

        Raises:
            IdempotencyConflict: the key was used for another request.
            QuotaExceeded: the tenant has all it may have; nothing is stored.
            LimitsOverQuota: the request asks for more than the tenant may; nothing is stored.
        """
        ...

    async def get(self, job_id: str, *, tenant: str | None = None) -> Job:
        """Return a job; with `tenant`, only one of that tenant's.

        Raises:
            NoSuchJob: there is none.
        """
        ...

    async def list(
        self, *, tenant: str | None, where: Filter, cursor: str | None = None, limit: int = 50
    ) -> Page:
        """List jobs, newest first.

        Raises:
            BadRequest: the cursor is not one of ours.
        """
        ...

    async def acquire(
        self, worker: str, *, lease: timedelta, limit: int, per_tenant: int
    ) -> Sequence[Job]:
        """Take up to `limit` queued jobs and hold them for `lease`.

        Higher priority first, then older; no tenant runs more than `per_tenant` at once.
        """
        ...

    async def renew(self, worker: str, job_ids: Sequence[str], *, lease: timedelta) -> set[str]:
        """Hold on to jobs; return those that are still this worker's."""
        ...

    async def place(
        self, worker: str, job_id: str, *, machine: str, rung: Rung, entry: Entry
    ) -> None:
        """Note which machine a held job runs on, and say so in its history.

        Raises:
            LeaseLost: another worker has it, or it is over.
        """
        ...

    async def finish(
        self,
        worker: str,
        job_id: str,
        outcome: Outcome,
        *,
        entries: Sequence[Entry] = (),
        cpu_s: float = 0.0,
        kept_bytes: int = 0,
    ) -> Job:
        """End a held job, and count what it used and what it leaves against its tenant's quota.

        `entries` go into its history before its end.

        Raises:
            LeaseLost: another worker has it, or it is over.
        """
        ...

    async def release(self, worker: str, job_id: str) -> None:
        """Put a held job back into the queue, as if it had not been taken. Idempotent."""
        ...

    async def cancel(self, job_id: str, *, tenant: str | None = None) -> Job:
        """End a queued job at once; ask the worker of a running one to. Idempotent.

        Raises:
            NoSuchJob: there is none.
        """
        ...

    async def cancelled(self, worker: str) -> set[str]:
        """Return the jobs this worker holds that someone wants ended."""
        ...

    async def machines(self) -> set[str]:
        """Return the machines of jobs that are not over: those must not be swept."""
        ...

    async def over_before(self, moment: datetime, *, limit: int) -> Sequence[str]:
        """Return jobs that ended before that moment, the oldest first."""
        ...

    async def known(self, job_ids: Sequence[str]) -> set[str]:
        """Return those of the ids that are a job's."""
        ...

    async def reap(self) -> Sequence[Job]:
        """Take back jobs whose lease ran out; return them as they are now.

        They are queued again with the machine they ran on noted, so that the next
        worker can adopt it; whether a lost machine means another try is its to say.
        """
        ...

    async def delete(self, job_id: str, *, tenant: str | None = None) -> None:
        """Forget a job that is over.

        Raises:
            NoSuchJob: there is none.
            JobNotOver: it has not ended.
        """
        ...

    async def counts(self) -> Mapping[State, int]:
        """Count jobs by state."""
        ...
