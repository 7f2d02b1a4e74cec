"""What is past its time goes, and nothing else, whatever it is kept in."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cloche.core.blobs import artifacts_key, upload_key
from cloche.core.errors import NoSuchJob, NoSuchUpload, StoreUnavailable
from cloche.core.job import Outcome, Reason, Request, State
from cloche.core.uploads import Upload
from cloche.jobs.retention import Removed, Retention
from cloche.stores.blobs import Blobs
from cloche.stores.database import Database
from cloche.stores.queue import Queue
from cloche.stores.uploads import Uploads

DAY = timedelta(days=1)
NEVER = timedelta(days=1000)
AT_ONCE = timedelta(seconds=-1)
DONE = Outcome(state=State.SUCCEEDED, reason=Reason.DONE, exit_code=0)


class Stores:
    """Everything that retention looks after."""

    def __init__(self, database: Database, blobs: Blobs, folder: Path) -> None:
        self.queue = Queue(database)
        self.uploads = Uploads(database)
        self.blobs = blobs
        self.folder = folder

    def retention(
        self,
        *,
        keep_jobs: timedelta | None = None,
        keep_uploads: timedelta = NEVER,
        stray_after: timedelta = DAY,
    ) -> Retention:
        return Retention(
            self.queue,
            self.uploads,
            self.blobs,
            keep_jobs=keep_jobs,
            keep_uploads=keep_uploads,
            stray_after=stray_after,
        )

    async def put(self, key: str, data: bytes, age: timedelta = timedelta()) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield data

        await self.blobs.put(key, pieces())
        then = time.time() - age.total_seconds()
        os.utime(self.folder / "blobs" / key, (then, then))

    async def job(self, *, over: bool = True) -> str:
        request = Request.model_validate({"kind": "shell", "code": "true"})
        job_id = (await self.queue.submit("a", request)).job.id
        await self.queue.acquire("w", lease=DAY, limit=9, per_tenant=99)
        await self.put(artifacts_key(job_id), b"zip!", age=9 * DAY)
        if over:
            await self.queue.finish("w", job_id, DONE)
        return job_id

    async def upload(self, number: int, age: timedelta) -> str:
        upload = Upload(
            id=f"{number:032x}",
            tenant="a",
            size=6,
            sha256="0" * 64,
            created_at=datetime.now(UTC) - age,
        )
        await self.put(upload_key(upload.id), b"upload", age)
        await self.uploads.add(upload)
        return upload.id

    async def keys(self) -> list[str]:
        return sorted(
            [blob.key for prefix in ("jobs/", "uploads/") async for blob in self.blobs.list(prefix)]
        )


@pytest.fixture
async def stores(database: Database, tmp_path: Path) -> Stores:
    return Stores(database, await Blobs.open_at((tmp_path / "blobs").as_uri()), tmp_path)


async def test_ended_jobs_are_forgotten_with_all_they_left(stores: Stores) -> None:
    ended, running = await stores.job(), await stores.job(over=False)

    assert await stores.retention(keep_jobs=DAY).collect() == Removed()
    assert await stores.retention(keep_jobs=None).collect() == Removed()
    removed = await stores.retention(keep_jobs=AT_ONCE).collect()

    assert removed == Removed(jobs=1, bytes=4)
    with pytest.raises(NoSuchJob):
        await stores.queue.get(ended)
    assert (await stores.queue.get(running)).state is State.RUNNING
    assert await stores.keys() == [artifacts_key(running)]


async def test_old_uploads_are_forgotten(stores: Stores) -> None:
    old, young = await stores.upload(1, 8 * DAY), await stores.upload(2, 6 * DAY)

    removed = await stores.retention(keep_uploads=7 * DAY).collect(strays=False)

    assert removed == Removed(uploads=1, bytes=6)
    with pytest.raises(NoSuchUpload):
        await stores.uploads.get(old)
    assert (await stores.uploads.get(young)).id == young
    assert await stores.keys() == [upload_key(young)]


async def test_blobs_of_nobody_go_once_they_are_a_day_old(stores: Stores) -> None:
    kept = [
        artifacts_key(await stores.job()),
        upload_key(await stores.upload(1, 3 * DAY)),
        artifacts_key("a" * 16),  # Of a put that is not yet done, for all we know.
        "uploads/not-ours",
    ]
    await stores.put(kept[2], b"young", age=DAY / 2)
    await stores.put(kept[3], b"strange", age=9 * DAY)
    await stores.put(artifacts_key("b" * 16), b"stray", age=2 * DAY)
    await stores.put(upload_key("c" * 32), b"stray", age=2 * DAY)

    assert await stores.retention().collect(strays=False) == Removed()
    assert await stores.retention().collect() == Removed(orphans=2, bytes=10)

    assert await stores.keys() == sorted(kept)


async def test_stale_halves_of_puts_go(stores: Stores) -> None:
    folder = stores.folder / "blobs/uploads"
    stale, fresh = folder / f"{'d' * 32}#1", folder / f"{'e' * 32}#1"
    folder.mkdir(parents=True)
    for path in (stale, fresh):
        path.write_bytes(b"12345")
    os.utime(stale, (1, 1))

    assert await stores.retention().collect() == Removed(bytes=5)

    assert (stale.exists(), fresh.exists()) == (False, True)


async def test_several_servers_count_each_thing_once(stores: Stores) -> None:
    for number in range(30):
        await stores.job()
        await stores.upload(number, 8 * DAY)
        await stores.put(upload_key(f"f{number:031x}"), b"stray", age=2 * DAY)

    passes = await asyncio.gather(
        *(stores.retention(keep_jobs=AT_ONCE, keep_uploads=DAY).collect() for _ in range(3))
    )

    assert sum(removed.jobs for removed in passes) == 30
    assert sum(removed.uploads for removed in passes) == 30
    assert await stores.keys() == []


class AwayAtFirst(Blobs):
    """Cannot be reached at first."""

    def __init__(self, blobs: Blobs) -> None:
        super().__init__(blobs._store, blobs._folder)
        self.asked = 0

    async def sweep(self, before: datetime) -> int:
        self.asked += 1
        if self.asked == 1:
            raise StoreUnavailable("It is away.", remedy="Wait.")
        if self.asked == 2:
            raise RuntimeError("a mistake of ours")
        return await super().sweep(before)


async def test_the_loop_outlives_a_store_that_is_away(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    stores.blobs = away = AwayAtFirst(stores.blobs)
    await stores.put(upload_key("c" * 32), b"stray", age=2 * DAY)
    retention = asyncio.create_task(stores.retention().run(every_s=0.01))
    async with asyncio.timeout(20):
        while away.asked < 3:
            await asyncio.sleep(0.01)
    retention.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retention

    assert await stores.keys() == []
    assert "It is away." in caplog.text
    assert away.asked == 3, "blobs are listed seldom"
