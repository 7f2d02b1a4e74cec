"""Files in a machine: what its user may touch, below /workspace, /home/user and /tmp."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from pathlib import PurePosixPath

from cloche.core.errors import BadRequest, NoSuchFile
from cloche.core.files import Change, FileEntry, Listing, Matches, Paths
from cloche.sandbox import wire
from cloche.sandbox.client import REPLY_BYTES, Client, Query

Path = str | PurePosixPath


class Files:
    """The machine's files. Relative paths start at /workspace.

    Every call may raise:
        PathRefused: the path, or a link on the way, leads out of the user's folders.
        NoSuchFile: nothing is there.
        FileRefused: the kernel said no: a folder where a file is wanted, say.
        MachineFull: the machine's disk is full.
        BadRequest: the path is malformed.
        SandboxLost, GuestMisbehaved: the machine is gone, or lies.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def read(
        self,
        path: Path,
        *,
        offset: int = 0,
        limit: int | None = None,
        max_bytes: int = REPLY_BYTES,
    ) -> bytes:
        """Read a file, or `limit` bytes of it from `offset`.

        Raises:
            ReplyTooLarge: it is larger than `max_bytes`.
        """
        query: Query = {"path": _absolute(path), "offset": _count(offset), "limit": _count(limit)}
        return await self._client.fetch("GET", "/files", query, limit=max_bytes)

    async def read_text(self, path: Path, *, max_bytes: int = REPLY_BYTES) -> str:
        return (await self.read(path, max_bytes=max_bytes)).decode(errors="replace")

    async def stream(self, path: Path, *, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Read a file of any size, piece by piece."""
        query: Query = {"path": _absolute(path), "offset": _count(offset)}
        async with self._client.open("GET", "/files", query, prompt=True) as exchange:
            async for data in exchange.pieces():
                yield data

    async def write(
        self,
        path: Path,
        data: bytes | str | AsyncIterable[bytes],
        *,
        mode: int = 0o644,
        parents: bool = True,
    ) -> None:
        """Write a file in one go: whoever reads meanwhile sees the old one or the new one."""
        body = data.encode() if isinstance(data, str) else data
        query: Query = {"path": _absolute(path), "mode": mode, "parents": parents}
        timeout_s = None if not isinstance(body, bytes) else 300.0
        await self._client.call(wire.Done, "PUT", "/files", query, body, timeout_s=timeout_s)

    async def stat(self, path: Path) -> FileEntry:
        """Describe what is at `path`; a link is described, not followed."""
        query: Query = {"path": _absolute(path)}
        return (await self._client.call(wire.EntryLine, "GET", "/files/stat", query)).value()

    async def exists(self, path: Path) -> bool:
        try:
            await self.stat(path)
        except NoSuchFile:
            return False
        return True

    async def list(self, path: Path = "/workspace") -> Listing:
        query: Query = {"path": _absolute(path)}
        return (await self._client.call(wire.ListingLine, "GET", "/files/list", query)).value()

    async def mkdir(self, path: Path, *, parents: bool = True) -> None:
        query: Query = {"path": _absolute(path), "parents": parents}
        await self._client.call(wire.Done, "POST", "/files/mkdir", query)

    async def move(self, path: Path, to: Path) -> None:
        query: Query = {"path": _absolute(path), "to": _absolute(to)}
        await self._client.call(wire.Done, "POST", "/files/move", query)

    async def remove(self, path: Path, *, recursive: bool = False) -> None:
        query: Query = {"path": _absolute(path), "recursive": recursive}
        await self._client.call(wire.Done, "DELETE", "/files", query, timeout_s=300.0)

    async def glob(self, pattern: str, path: Path = "/workspace") -> Paths:
        """Find paths below a folder: `**/*.py`. Links are listed, not followed."""
        query: Query = {"path": _absolute(path), "pattern": pattern}
        return (await self._client.call(wire.PathsLine, "GET", "/files/glob", query)).value()

    async def grep(
        self,
        pattern: str,
        path: Path = "/workspace",
        *,
        glob: str | None = None,
        fixed: bool = False,
        ignore_case: bool = False,
        limit: int = 1000,
    ) -> Matches:
        """Find lines that match a regular expression, or a fixed text, as ripgrep does."""
        query: Query = {
            "path": _absolute(path),
            "pattern": pattern,
            "glob": glob,
            "fixed": fixed,
            "ignore_case": ignore_case,
            "limit": limit,
        }
        return (await self._client.call(wire.MatchesLine, "GET", "/files/grep", query)).value()

    async def watch(self, path: Path = "/workspace") -> AsyncGenerator[Change, None]:
        """Yield what changes below a folder, as it happens, until the caller stops."""
        lines = self._client.lines(wire.WatchLine, "GET", "/files/watch", {"path": _absolute(path)})
        async with aclosing(lines):
            async for line in lines:
                if change := line.value():
                    yield change
        raise wire.misbehaved("the end of a watch")

    async def download(self, path: Path = "/workspace") -> AsyncGenerator[bytes, None]:
        """Yield a tar of a file or folder."""
        query: Query = {"path": _absolute(path)}
        async with self._client.open("GET", "/files/tar", query, prompt=True) as exchange:
            async for data in exchange.pieces():
                yield data

    async def upload(
        self, archive: bytes | AsyncIterable[bytes], path: Path = "/workspace"
    ) -> None:
        """Unpack a tar into a folder, as the machine's user."""
        query: Query = {"path": _absolute(path)}
        await self._client.call(wire.Done, "PUT", "/files/tar", query, archive, timeout_s=None)


def _absolute(path: Path) -> str:
    text = str(path)
    if not text or "\0" in text or len(text) > 4096 or not _is_unicode(text):
        raise BadRequest(
            "A path is empty, longer than 4096 characters, or holds a NUL or half a character.",
            remedy="Give the path of a file below /workspace, /home/user or /tmp.",
        )
    return text if text.startswith("/") else f"/workspace/{text}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _count(value: int | None) -> int | None:
    if value is not None and value < 0:
        raise BadRequest(f"{value} is below zero.", remedy="Offsets and limits count from 0.")
    return value
