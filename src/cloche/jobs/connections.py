"""A job's network, and the record of what it was used for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from cloche.core.errors import LeaseLost, StoreUnavailable
from cloche.core.job import Job
from cloche.core.network import Attempt
from cloche.core.record import Entry, Record
from cloche.sandbox.networks import Networks
from cloche.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.5
MOST: Final = 100
"""Different attempts that one event tells of; a program can make thousands a second."""


class Notes:
    """Attempts that wait to be written down; those alike are counted, not listed."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[object, ...], dict[str, Any]] = {}
        self._bytes = 0
        self._left_out = 0

    def add(self, attempt: Attempt) -> None:
        self._bytes += attempt.bytes_up + attempt.bytes_down
        told = {**asdict(attempt), "at": attempt.at.isoformat(), "count": 1}
        key = tuple(told[name] for name in ("name", "port", "via", "verdict", "reason", "address"))
        known = self._waiting.get(key)
        if known is not None:
            for name in ("count", "bytes_up", "bytes_down"):
                known[name] += told[name]
            known["duration_s"] = max(known["duration_s"], told["duration_s"])
        elif len(self._waiting) < MOST:
            self._waiting[key] = told
        else:
            self._left_out += 1

    def take(self) -> Entry | None:
        """Return what is to be written down, if there is something."""
        if not self._waiting:
            return None
        attempts, bytes_, left_out = list(self._waiting.values()), self._bytes, self._left_out
        self._waiting, self._bytes, self._left_out = {}, 0, 0
        body = {"attempts": attempts, "bytes": bytes_, "left_out": left_out}
        return Entry(kind="network", body=body)


@contextlib.asynccontextmanager
async def network_of(
    job: Job,
    sandbox: Sandbox,
    networks: Networks,
    spent_bytes: int,
    record: Record,
    worker: str,
) -> AsyncIterator[Mapping[str, str]]:
    """Give a job's machine its network for as long as the job runs; yield its variables.

    Raises:
        BadRequest, PortTaken: as `Networks.open`.
    """
    network = job.request.network
    if network.closed:
        yield {}
        return
    notes = Notes()

    async def write() -> None:
        if (entry := notes.take()) is not None:
            await record.append(worker, job.id, [entry])

    try:
        async with networks.open(
            sandbox, network, tell=notes.add, spent_bytes=spent_bytes
        ) as opened:
            writing = asyncio.create_task(_now_and_then(write))
            try:
                yield opened.env
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
    finally:
        try:
            await write()
        except (LeaseLost, StoreUnavailable) as error:
            logger.warning("job %s: its last connections are not in its history: %s", job.id, error)


async def _now_and_then(write: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        try:
            await write()
        except StoreUnavailable as error:
            logger.warning("%s What was connected to is not written down.", error)
        except LeaseLost:
            return  # Whoever runs the job finds out as well.
