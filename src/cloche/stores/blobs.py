"""Blobs in a folder, or in S3, Google Cloud Storage or Azure: `cloche.core.blobs.Blobs`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from cloche.core.blobs import Blob
from cloche.core.errors import BadSettings, NoSuchFile, StoreUnavailable

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore, RetryConfig

logger = logging.getLogger(__name__)

PART_BYTES: Final = 8 << 20
"""What is sent at once; what fits into one part is put in one call."""
_PARTS_AT_ONCE: Final = 3
READ_BYTES: Final = 4 << 20
"""What is fetched at once: a slow reader then holds no connection open until it times out."""
_SEEK_BYTES: Final = 256 << 10
_CLOUDS: Final = frozenset({"s3", "gs", "az"})
_PARTIAL = re.compile(r".+#\d+")
"""How obstore names a file of a folder while it is being written."""
_RETRY: Final[RetryConfig] = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}


class Blobs:
    """Blobs through obstore. What each call does and raises is told at the protocol."""

    def __init__(self, store: ObjectStore, folder: Path | None = None) -> None:
        self._store = store
        self._folder = folder

    @classmethod
    async def open_at(cls, address: str) -> Blobs:
        """Open `file:///FOLDER`, `s3://BUCKET/PREFIX`, `gs://…` or `az://…`, and see it answer.

        Credentials, and where a self-hosted S3 is, come from the usual environment variables.

        Raises:
            BadSettings: the address is not of a store we speak.
            StoreUnavailable: it does not answer, or does not let us in.
        """
        blobs = cls._at(address)
        async for _ in blobs.list("uploads/"):
            break
        return blobs

    @classmethod
    def _at(cls, address: str) -> Blobs:
        try:
            url = urlsplit(address)
            if url.scheme == "file" and not url.netloc and url.path.strip("/"):
                folder = Path(unquote(url.path))
                folder.mkdir(parents=True, exist_ok=True)
                return cls(LocalStore(folder, automatic_cleanup=True), folder)
            if url.scheme not in _CLOUDS or not url.netloc or "@" in url.netloc or url.query:
                # The address itself may hold a secret: it is not repeated.
                raise _bad("it is none of file:///FOLDER, s3://, gs:// and az://BUCKET/PREFIX")
            # No client_options: given here, they would displace AWS_ALLOW_HTTP and its like.
            return cls(from_url(address, retry_config=_RETRY))
        except (BaseError, ValueError, OSError) as error:
            raise _bad(_sentence(error)) from error

    async def put(self, key: str, pieces: AsyncIterable[bytes]) -> None:
        source = _Source(pieces)
        # obstore gives up an unfinished upload when its source fails, but leaves it lying about
        # when it is cancelled itself: so a cancelled put is let go through its source.
        putting = asyncio.ensure_future(self._put(key, source))
        try:
            await asyncio.shield(putting)
        except asyncio.CancelledError:
            source.stop()
            await asyncio.wait((putting,))
            if not putting.cancelled() and putting.exception() is None:
                await self.delete(key)
            raise

    async def _put(self, key: str, source: _Source) -> None:
        first = await source.take(PART_BYTES)
        with self._translated(key, source):
            if source.ended:
                await obstore.put_async(self._store, key, first, use_multipart=False)
            else:
                await obstore.put_async(
                    self._store,
                    key,
                    source.after(first),
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )

    async def find(self, key: str) -> Blob | None:
        with self._translated(key):
            try:
                return _blob(await obstore.head_async(self._store, key))
            except FileNotFoundError:
                return None

    async def read(
        self, blob: Blob, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        end = blob.size if stop is None else min(stop, blob.size)
        while start < end:
            upto = min(start + READ_BYTES, end)
            with self._translated(blob.key):
                found = await obstore.get_async(
                    self._store, blob.key, options=_piece(blob, start, upto)
                )
                data = bytes(await found.bytes_async())
            _check(blob, len(data), upto - start)
            start = upto
            yield data

    def open(self, blob: Blob) -> BinaryIO:
        return cast("BinaryIO", io.BufferedReader(_Reader(self, blob), _SEEK_BYTES))

    def read_now(self, blob: Blob, start: int, stop: int) -> bytes:
        """Read some bytes, blocking."""
        with self._translated(blob.key):
            found = obstore.get(self._store, blob.key, options=_piece(blob, start, stop))
            data = bytes(found.bytes())
        _check(blob, len(data), stop - start)
        return data

    async def list(self, prefix: str) -> AsyncIterator[Blob]:
        listing = obstore.list(self._store, prefix, chunk_size=500)
        while True:
            with self._translated(prefix):
                try:
                    batch = await anext(listing)
                except StopAsyncIteration:
                    return
            for found in batch:
                yield _blob(found)

    async def delete(self, key: str) -> None:
        with self._translated(key), contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, key)

    async def sweep(self, before: datetime) -> int:
        if self._folder is None:
            return 0
        return await asyncio.to_thread(_sweep, self._folder, before.timestamp())

    @contextlib.contextmanager
    def _translated(self, key: str, source: _Source | None = None) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            if source is not None and source.error is not None:
                # It failed first; that giving up what was sent did not go well is no news.
                raise source.error from source.error.__cause__
            if isinstance(error, FileNotFoundError) and source is None:
                raise NoSuchFile(
                    f"There is no {key} in the blob store.", remedy="It was deleted meanwhile."
                ) from error
            # What obstore says names hosts and buckets: that is for the operator alone.
            logger.warning("%s: %s", key, _sentence(error))
            raise StoreUnavailable(
                f"The blob store does not do its work: {type(error).__name__}.",
                remedy="Check that it runs, has room and lets this server in; then try again.",
            ) from error


class _Source:
    """What is put, with a way to make it fail from outside."""

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        self._pieces = aiter(pieces)
        self._reading: asyncio.Future[bytes | None] | None = None
        self._stopped = False
        self.ended = False
        self.error: BaseException | None = None

    def stop(self) -> None:
        self._stopped = True
        if self._reading is not None:
            self._reading.cancel()

    async def take(self, size: int) -> bytes:
        """Return the first `size` bytes or a piece more, or all there are."""
        taken = bytearray()
        while len(taken) < size and (piece := await self._next()) is not None:
            taken += piece
        return bytes(taken)

    async def after(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        while (piece := await self._next()) is not None:
            yield piece

    async def _next(self) -> bytes | None:
        try:
            if self._stopped:
                raise _Stopped
            self._reading = asyncio.ensure_future(anext(self._pieces, None))
            piece = await self._reading
        except BaseException as error:
            stopped = self._stopped and isinstance(error, asyncio.CancelledError)
            self.error = _Stopped() if stopped else error
            raise self.error from error.__cause__
        self.ended = piece is None
        return piece


class _Stopped(Exception):
    """The put was cancelled."""


class _Reader(io.RawIOBase):
    """A blob as a file: each read fetches just the bytes asked for."""

    def __init__(self, blobs: Blobs, blob: Blob) -> None:
        self._blobs = blobs
        self._blob = blob
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._blob.size}[whence]
        if base + offset < 0:
            raise OSError(22, "Seek before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        stop = min(self._at + len(buffer), self._blob.size)
        if stop <= self._at:
            return 0
        data = self._blobs.read_now(self._blob, self._at, stop)
        buffer[: len(data)] = data
        self._at = stop
        return len(data)


def _blob(found: ObjectMeta) -> Blob:
    # Some servers quote the tag in one answer and not in the other.
    tag = found["e_tag"]
    return Blob(
        key=found["path"],
        size=found["size"],
        modified_at=found["last_modified"],
        tag=None if tag is None else tag.strip('"'),
    )


def _piece(blob: Blob, start: int, stop: int) -> GetOptions:
    """Ask for some bytes, of this very version: two versions never mix in one answer."""
    options: GetOptions = {"range": (start, stop)}
    if blob.tag is not None and not blob.tag.startswith("W/"):
        options["if_match"] = f'"{blob.tag}"'
    return options


def _check(blob: Blob, size: int, wanted: int) -> None:
    if size != wanted:
        raise StoreUnavailable(
            f"The blob store sent {size} bytes of {blob.key} where {wanted} were asked for.",
            remedy="Try again.",
        )


def _sweep(folder: Path, before: float) -> int:
    removed = 0
    for path in folder.rglob("*#*"):
        with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            if _PARTIAL.fullmatch(path.name) and about.st_mtime < before:
                path.unlink()
                removed += about.st_size
    return removed


def _sentence(error: BaseException) -> str:
    """Say what obstore says, without its pages of detail."""
    return str(error).partition("\n")[0].rstrip(". ")[:300] + "."


def _bad(why: str) -> BadSettings:
    return BadSettings(
        f"The blob store's address cannot be used: {why.rstrip('.')}.",
        remedy="Correct CLOCHE_BLOBS, or unset it for a folder in the data folder.",
    )
