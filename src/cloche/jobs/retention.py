"""Forgets what is past its time, and what belongs to nobody.

Several servers may do this on one store at once: whoever deletes a row counts it, a blob may be
deleted twice, and a stray blob is left alone until nothing under way can still claim it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cloche.core.blobs import JOBS, UPLOADS, Blob, Blobs, artifacts_key, owner_of, upload_key
from cloche.core.errors import NoSuchJob, NoSuchUpload
from cloche.core.queue import Queue
from cloche.core.uploads import Uploads
from cloche.jobs.persistence import attempt

logger = logging.getLogger(__name__)

EVERY_S: Final = 300.0
STRAY_AFTER: Final = timedelta(days=1)
"""Far longer than any put takes: its row may be written only once it is done."""
_LIST_EVERY_S: Final = 3600.0
"""Object stores charge for listings, so strays are looked for more seldom."""
_BATCH: Final = 200

Known = Callable[[Sequence[str]], Awaitable[set[str]]]


@dataclass(slots=True, kw_only=True)
class Removed:
    """What one pass removed."""

    jobs: int = 0
    uploads: int = 0
    orphans: int = 0
    """Blobs that belonged to no job or upload."""
    bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.jobs or self.uploads or self.orphans or self.bytes)


class Retention:
    """Keeps what is to be kept, for as long as it is to be kept."""

    def __init__(
        self,
        queue: Queue,
        uploads: Uploads,
        blobs: Blobs,
        *,
        keep_jobs: timedelta | None,
        keep_uploads: timedelta,
        stray_after: timedelta = STRAY_AFTER,
    ) -> None:
        self._queue = queue
        self._uploads = uploads
        self._blobs = blobs
        self._keep_jobs = keep_jobs
        self._keep_uploads = keep_uploads
        self._stray_after = stray_after
        self._listed = -_LIST_EVERY_S

    async def run(self, every_s: float = EVERY_S) -> None:
        """Collect again and again, until cancelled. What goes wrong is told and outlived."""
        while True:
            # Servers that were started together must not all do this at once.
            await asyncio.sleep(every_s * random.uniform(0.5, 1.5))  # noqa: S311
            await attempt("retention", self._pass())

    async def _pass(self) -> None:
        strays = time.monotonic() - self._listed >= _LIST_EVERY_S
        removed = await self.collect(strays=strays)
        if strays:
            self._listed = time.monotonic()
        if removed:
            logger.info("retention: %s", removed)

    async def collect(self, *, strays: bool = True) -> Removed:
        """Make one pass; without `strays`, only over what a row tells of.

        Raises:
            StoreUnavailable: a store cannot be reached; what is left is for the next pass.
        """
        removed = Removed()
        now = datetime.now(UTC)
        if self._keep_jobs is not None:
            await self._forget_jobs(now - self._keep_jobs, removed)
        await self._forget_uploads(now - self._keep_uploads, removed)
        if strays:
            before = now - self._stray_after
            await self._remove_strays(JOBS, self._queue.known, before, removed)
            await self._remove_strays(UPLOADS, self._uploads.known, before, removed)
            removed.bytes += await self._blobs.sweep(before)
        return removed

    async def _forget_jobs(self, before: datetime, removed: Removed) -> None:
        while due := await self._queue.over_before(before, limit=_BATCH):
            for job_id in due:
                # The row first: a blob without a row is a stray, and found again.
                with contextlib.suppress(NoSuchJob):
                    await self._queue.delete(job_id)
                    removed.jobs += 1
                removed.bytes += await self._delete(artifacts_key(job_id))

    async def _forget_uploads(self, before: datetime, removed: Removed) -> None:
        while due := await self._uploads.made_before(before, limit=_BATCH):
            for upload_id in due:
                with contextlib.suppress(NoSuchUpload):
                    gone = await self._uploads.delete(upload_id)
                    removed.uploads += 1
                    removed.bytes += gone.size
                await self._blobs.delete(upload_key(upload_id))

    async def _delete(self, key: str) -> int:
        blob = await self._blobs.find(key)
        if blob is None:
            return 0
        await self._blobs.delete(key)
        return blob.size

    async def _remove_strays(
        self, prefix: str, known: Known, before: datetime, removed: Removed
    ) -> None:
        old: list[Blob] = []
        async for blob in self._blobs.list(prefix):
            if blob.modified_at < before and owner_of(blob.key) is not None:
                old.append(blob)
            if len(old) >= _BATCH:
                await self._remove_unowned(old, known, removed)
                old = []
        await self._remove_unowned(old, known, removed)

    async def _remove_unowned(self, old: Sequence[Blob], known: Known, removed: Removed) -> None:
        owners = {blob.key: owner for blob in old if (owner := owner_of(blob.key))}
        owned = await known(sorted(set(owners.values()))) if owners else set()
        for blob in old:
            if owners[blob.key] not in owned:
                await self._blobs.delete(blob.key)
                removed.orphans += 1
                removed.bytes += blob.size
