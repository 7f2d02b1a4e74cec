"""A job's append-only history: the source of its logs, its status and its replay."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

Kind = Literal[
    "submitted",  # the request was accepted: traceparent, if it was part of a trace
    "started",    # a worker took the job up: worker, attempt
    "machine",    # the job runs on this machine: machine, rung, adopted
    "inputs",     # the files it was given are in place: files
    "step",       # a step begins: step, tool, process
    "output",     # bytes a step wrote: step, stream, offset; the bytes are its data
    "limit",      # the step is to be ended, for it passed a bound: step, reason, error
    "step_ended", # step, exit_code, reason, duration_s, cpu_s, max_rss_kib
    "network",    # connections of the last moment: attempts, bytes, left_out
    "artifacts",  # what was kept: files, bytes
    "retried",    # the job goes back into the queue: why
    "finished",   # state, reason, exit_code, error
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something to be remembered."""

    kind: Kind
    body: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""
    """Output bytes. They are also part of the job's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something remembered: an entry with its place in the history."""

    seq: int
    """Counts from 1 within a job, without gaps."""
    at: datetime
    kind: str
    body: Mapping[str, Any]
    data: bytes = b""
    log_offset: int | None = None
    """Where `data` begins in the job's log."""
    size: int = 0
    """How long `data` is, also where it was not asked for."""


class Record(Protocol):
    """Histories of jobs. Nothing in one is ever changed.

    Every call may raise `StoreUnavailable`.
    """

    async def append(self, worker: str, job_id: str, entries: Sequence[Entry]) -> int:
        """Add entries; durable on return. Returns the last one's number.

        Raises:
            LeaseLost: the job is no longer this worker's to write about.
        """
        ...

    def listening(self, job_id: str) -> AbstractContextManager[asyncio.Event]:
        """Return an event that is set as soon as this process adds to a job's history.

        What other processes add is found by looking again now and then.
        """
        ...

    async def events(
        self, job_id: str, *, after: int = 0, limit: int = 500, data: bool = True
    ) -> Sequence[Event]:
        """Return events after number `after`, oldest first; without their bytes if need be."""
        ...

    async def log(self, job_id: str, *, offset: int, limit: int) -> bytes:
        """Return up to `limit` bytes of the job's log from byte `offset`."""
        ...

    async def log_size(self, job_id: str) -> int: ...

    async def tails(self, job_id: str, *, limit: int) -> Mapping[str, bytes]:
        """Return the last `limit` bytes of each stream, `stdout` and `stderr`."""
        ...
