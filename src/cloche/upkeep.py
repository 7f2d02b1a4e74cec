"""Puts retention together from the settings, for a server and for `cloche gc`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta

from cloche.core import blobs as core_blobs
from cloche.core import queue as core_queue
from cloche.core import uploads as core_uploads
from cloche.jobs.retention import Retention
from cloche.settings import Settings
from cloche.stores.blobs import Blobs
from cloche.stores.database import Database
from cloche.stores.queue import Queue
from cloche.stores.uploads import Uploads


def retention(
    settings: Settings,
    queue: core_queue.Queue,
    uploads: core_uploads.Uploads,
    blobs: core_blobs.Blobs,
) -> Retention:
    days = settings.keep_jobs_days
    return Retention(
        queue,
        uploads,
        blobs,
        keep_jobs=None if days is None else timedelta(days=days),
        keep_uploads=timedelta(days=settings.keep_uploads_days),
    )


@contextlib.asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Retention]:
    """Open the stores for a single pass.

    Raises:
        BadSettings, StoreUnavailable: they cannot be opened.
    """
    blobs = await Blobs.open_at(settings.blob_address)
    database = await Database.open(settings.database_address)
    try:
        yield retention(settings, Queue(database), Uploads(database), blobs)
    finally:
        await database.close()
