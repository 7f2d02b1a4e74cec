"""One set of checks for the record of uploads, on every database it runs on."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from cloche.core.errors import NoSuchUpload
from cloche.core.uploads import Upload
from cloche.stores.database import Database
from cloche.stores.uploads import Uploads

NOW = datetime.now(UTC)


@pytest.fixture
def uploads(database: Database) -> Uploads:
    return Uploads(database)


def upload(number: int = 1, *, tenant: str = "a", age: timedelta = timedelta()) -> Upload:
    return Upload(
        id=f"{number:032x}",
        tenant=tenant,
        size=5_000_000_000,
        sha256="0" * 64,
        created_at=(NOW - age).replace(microsecond=0),
    )


async def test_an_upload_is_there_as_it_was_added(uploads: Uploads) -> None:
    added = upload()
    await uploads.add(added)

    assert await uploads.get(added.id) == await uploads.get(added.id, "a") == added


async def test_an_upload_is_its_tenants_alone(uploads: Uploads) -> None:
    added = upload()
    await uploads.add(added)

    for wrong in (uploads.get, uploads.delete):
        with pytest.raises(NoSuchUpload):
            await wrong(added.id, "b")
        with pytest.raises(NoSuchUpload):
            await wrong("'; drop table uploads")
    assert await uploads.get(added.id) == added


async def test_an_upload_is_deleted_once(uploads: Uploads) -> None:
    added = upload()
    await uploads.add(added)

    ends = await asyncio.gather(
        *(uploads.delete(added.id, "a") for _ in range(4)), return_exceptions=True
    )

    assert [end for end in ends if not isinstance(end, NoSuchUpload)] == [added]
    with pytest.raises(NoSuchUpload):
        await uploads.get(added.id)


async def test_old_uploads_are_found_oldest_first(uploads: Uploads) -> None:
    for number in range(1, 5):
        await uploads.add(upload(number, age=timedelta(days=number)))

    due = await uploads.made_before(NOW - timedelta(days=1, hours=1), limit=2)

    assert due == [upload(4).id, upload(3).id]


async def test_strangers_are_told_from_uploads(uploads: Uploads) -> None:
    await uploads.add(upload(1))

    assert await uploads.known([upload(1).id, upload(2).id]) == {upload(1).id}
    assert await uploads.known([]) == set()
