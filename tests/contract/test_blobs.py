"""One set of checks for blobs, on a folder and on a real S3 server."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cloche.core.blobs import Blob, artifacts_key, owner_of, upload_key
from cloche.core.errors import BadSettings, NoSuchFile, StoreUnavailable
from cloche.stores.blobs import PART_BYTES, READ_BYTES, Blobs
from s3 import BUCKET, S3, s3

KEY = upload_key("0123456789abcdef")
LARGE = 3 * PART_BYTES + 12_345


@dataclass(frozen=True)
class Place:
    """Blobs, and the folder behind them."""

    blobs: Blobs
    folder: Path

    def files(self) -> list[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in found)


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3]:
    with s3() as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    if request.param == "folder":
        return Place(await Blobs.open_at(tmp_path.as_uri()), tmp_path)
    server: S3 = request.getfixturevalue("s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    prefix = f"some/{tmp_path.name}"
    return Place(await Blobs.open_at(f"s3://{BUCKET}/{prefix}"), server.folder / prefix)


@pytest.fixture
def blobs(place: Place) -> Blobs:
    return place.blobs


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


async def pieces(data: bytes, size: int = 1 << 16) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def put(blobs: Blobs, key: str, data: bytes) -> Blob:
    await blobs.put(key, pieces(data))
    found = await blobs.find(key)
    assert found is not None
    return found


async def read(blobs: Blobs, blob: Blob, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join([piece async for piece in blobs.read(blob, start, stop)])


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, LARGE])
async def test_what_is_put_is_read(place: Place, size: int) -> None:
    data = content(size)

    blob = await put(place.blobs, KEY, data)

    assert (blob.key, blob.size) == (KEY, size)
    assert abs(blob.modified_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert await read(place.blobs, blob) == data
    assert place.files() == [KEY]


async def test_a_put_replaces_what_was_there(blobs: Blobs) -> None:
    first = await put(blobs, KEY, b"first")
    second = await put(blobs, KEY, b"the second")

    assert first.tag != second.tag
    assert await read(blobs, second) == b"the second"


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, 1),
        (5, 15),
        (READ_BYTES - 1, READ_BYTES + 1),
        (LARGE - 1, LARGE),
        (LARGE - 10, LARGE + 10),
        (7, None),
        (LARGE, None),
        (5, 5),
    ],
)
async def test_any_range_is_read(blobs: Blobs, start: int, stop: int | None) -> None:
    data = content(LARGE)
    blob = await put(blobs, KEY, data)

    assert await read(blobs, blob, start, stop) == data[start:stop]


async def test_large_blobs_are_read_piece_by_piece(blobs: Blobs) -> None:
    blob = await put(blobs, KEY, content(LARGE))

    sizes = [len(piece) async for piece in blobs.read(blob)]

    assert max(sizes) == READ_BYTES
    assert sum(sizes) == LARGE


async def test_what_is_not_there_is_not_found(blobs: Blobs) -> None:
    blob = await put(blobs, KEY, b"x")
    await blobs.delete(KEY)
    await blobs.delete(KEY)

    assert await blobs.find(KEY) is None
    with pytest.raises(NoSuchFile):
        await read(blobs, blob)
    with pytest.raises(NoSuchFile):
        await asyncio.to_thread(blobs.open(blob).read, 1)


async def test_blobs_are_listed_below_a_prefix(blobs: Blobs) -> None:
    keys = [upload_key(f"{number:016x}") for number in range(620)]
    await asyncio.gather(*(blobs.put(key, pieces(b"abc")) for key in keys))
    await blobs.put(artifacts_key("f" * 16), pieces(b"defg"))

    found = [blob async for blob in blobs.list("uploads/")]

    assert sorted(blob.key for blob in found) == keys
    assert {blob.size for blob in found} == {3}
    assert [blob.key async for blob in blobs.list("jobs/")] == [artifacts_key("f" * 16)]
    listed, looked_at = found[0], await blobs.find(found[0].key)
    assert looked_at is not None
    assert listed.tag == looked_at.tag


async def test_a_zip_is_read_in_place(blobs: Blobs, tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    large = content(LARGE)
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("large", large)
        zipped.writestr("small", b"hello")
    blob = await put(blobs, KEY, archive.read_bytes())

    def look() -> tuple[list[str], bytes, bytes]:
        with zipfile.ZipFile(blobs.open(blob)) as zipped:
            return zipped.namelist(), zipped.read("small"), zipped.read("large")

    assert await asyncio.to_thread(look) == (["large", "small"], b"hello", large)


class Broken(Exception):
    """The source failed."""


@pytest.mark.parametrize("after", [10, LARGE])
async def test_a_source_that_fails_leaves_nothing(place: Place, after: int) -> None:
    failure = Broken()

    async def failing() -> AsyncIterator[bytes]:
        async for piece in pieces(content(after)):
            yield piece
        raise failure

    with pytest.raises(Broken) as raised:
        await place.blobs.put(KEY, failing())

    assert raised.value is failure
    assert place.files() == []


@pytest.mark.parametrize("after", [10, LARGE])
async def test_a_put_that_is_cancelled_leaves_nothing(place: Place, after: int) -> None:
    stalled = asyncio.Event()

    async def stalling() -> AsyncIterator[bytes]:
        async for piece in pieces(content(after)):
            yield piece
        stalled.set()
        await asyncio.sleep(3600)

    putting = asyncio.create_task(place.blobs.put(KEY, stalling()))
    await stalled.wait()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting

    assert place.files() == []


async def test_a_put_is_all_or_nothing_to_a_reader(blobs: Blobs) -> None:
    before = await put(blobs, KEY, b"before")
    half = asyncio.Event()
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        async for piece in pieces(content(2 * PART_BYTES)):
            yield piece
        half.set()
        await go_on.wait()
        yield b"end"

    putting = asyncio.create_task(blobs.put(KEY, slow()))
    await half.wait()
    assert await read(blobs, before) == b"before"
    go_on.set()
    await putting

    found = await blobs.find(KEY)
    assert found is not None
    assert found.size == 2 * PART_BYTES + 3


async def test_what_a_killed_put_left_in_a_folder_is_swept(tmp_path: Path) -> None:
    blobs = await Blobs.open_at(tmp_path.as_uri())
    await put(blobs, KEY, b"whole")
    left = tmp_path / f"{KEY}#1"
    left.write_bytes(b"part")
    os.utime(left, (1, 1))
    fresh = tmp_path / f"{KEY}#2"
    fresh.write_bytes(b"under way")
    assert [blob.key async for blob in blobs.list("uploads/")] == [KEY]

    assert await blobs.sweep(datetime.now(UTC) - timedelta(days=1)) == 4

    assert sorted(path.name for path in (tmp_path / "uploads").iterdir()) == [
        Path(KEY).name,
        fresh.name,
    ]


async def test_a_blob_of_a_folder_that_was_replaced_is_not_read_on(tmp_path: Path) -> None:
    blobs = await Blobs.open_at(tmp_path.as_uri())
    old = await put(blobs, KEY, content(2 * READ_BYTES))
    reading = blobs.read(old)
    await anext(reading)
    await put(blobs, KEY, content(2 * READ_BYTES + 1))

    with pytest.raises(StoreUnavailable):
        await anext(reading)


@pytest.mark.parametrize(
    "address",
    [
        *("nonsense", "/a/folder", "ftp://a/b", "s3://", "s3:///x", "http://a/b", "memory:///"),
        *("file://host/path", "file:///", "s3://key:secret@bucket/a", "s3://b/a?x=y"),
        *("file:///proc/no/such", "az://container/no-account"),
    ],
)
async def test_a_bad_address_is_told_without_repeating_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(BadSettings) as raised:
        await Blobs.open_at(address)

    assert "CLOCHE_BLOBS" in raised.value.remedy
    assert "secret" not in raised.value.message


@pytest.mark.parametrize(
    "change", [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "NOBODY"}], ids=str
)
async def test_wrong_credentials_are_told(
    s3_server: S3, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    for name, value in {**s3_server.environment, **change}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnavailable):
        await Blobs.open_at(f"s3://{BUCKET}")
    blobs = Blobs._at(f"s3://{BUCKET}")
    await refuse_everything(blobs)


async def test_a_missing_bucket_is_told(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(StoreUnavailable):
        await Blobs.open_at("s3://no-such-bucket")
    with pytest.raises(StoreUnavailable):
        await Blobs._at("s3://no-such-bucket").put(KEY, pieces(b"x"))


async def test_a_server_that_is_away_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        blobs = await Blobs.open_at(f"s3://{BUCKET}")
    began = time.monotonic()

    await refuse_everything(blobs)

    assert time.monotonic() - began < 30


async def test_a_server_that_is_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = S3(
            endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", folder=Path()
        ).environment
        # The default is 30 seconds; obstore reads this as it does the others.
        for name, value in {**environment, "AWS_TIMEOUT": "1s"}.items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await Blobs._at(f"s3://{BUCKET}").find(KEY)
        assert time.monotonic() - began < 15


async def refuse_everything(blobs: Blobs) -> None:
    blob = Blob(key=KEY, size=10, modified_at=datetime.now(UTC), tag=None)
    with pytest.raises(StoreUnavailable):
        await blobs.find(KEY)
    with pytest.raises(StoreUnavailable):
        await blobs.put(KEY, pieces(b"small"))
    with pytest.raises(StoreUnavailable):
        await blobs.put(KEY, pieces(content(LARGE)))
    with pytest.raises(StoreUnavailable):
        await read(blobs, blob)
    with pytest.raises(StoreUnavailable):
        await asyncio.to_thread(blobs.open(blob).read, 1)
    with pytest.raises(StoreUnavailable):
        _ = [found async for found in blobs.list("uploads/")]
    with pytest.raises(StoreUnavailable):
        await blobs.delete(KEY)


def test_keys_are_made_of_ids_alone() -> None:
    for wrong in ("", "..", "a/b", "0" * 7, "../" + "0" * 16, "G" * 16, "0" * 65, "0" * 16 + "\n"):
        with pytest.raises(ValueError):
            artifacts_key(wrong)
        with pytest.raises(ValueError):
            upload_key(wrong)
    assert owner_of(artifacts_key("0" * 16)) == owner_of(upload_key("0" * 16)) == "0" * 16
    assert owner_of("uploads/README") is owner_of("other/0123456789abcdef") is None


async def test_an_unchanged_blob_keeps_its_tag(blobs: Blobs) -> None:
    blob = await put(blobs, KEY, b"same")
    again = await blobs.find(KEY)

    assert again is not None
    assert replace(again, modified_at=blob.modified_at) == blob
