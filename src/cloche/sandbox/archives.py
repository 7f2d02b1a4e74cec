"""Zips: of a machine's files on the way out, into a machine on the way in.

On the way out, every name is hostile. On the way in, the archive is: it is
unpacked inside the machine, by the machine's user, where a bomb fills a bounded
disk and a crooked name leads nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import zipfile
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from cloche.core.errors import BadRequest, MachineFull, NoSuchFile, PathRefused
from cloche.core.files import FileEntry
from cloche.sandbox.sandbox import Sandbox

MAX_FILES: Final = 10_000
MAX_BYTES: Final = 2 << 30
UNPACK_S: Final = 600.0
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest moment a zip can tell: equal files make equal zips."""


@dataclass(slots=True)
class Plan:
    """What goes into a zip."""

    root: PurePosixPath
    entries: list[FileEntry]
    truncated: bool
    """Whether something had to be left out."""
    files: int = 0
    bytes: int = 0


async def plan(sandbox: Sandbox, patterns: Sequence[str], path: str = "/workspace") -> Plan:
    """Find what the patterns match below a folder, up to a bound.

    Raises:
        NoSuchFile, PathRefused, FileRefused: the folder cannot be read.
    """
    root = PurePosixPath("/workspace", path)
    found: set[str] = set()
    truncated = False
    for pattern in patterns:
        matched = await sandbox.files.glob(pattern, str(root))
        found.update(name for name in matched.paths if _is_inside(name, root))
        truncated |= matched.truncated
    chosen = Plan(root=root, entries=[], truncated=truncated)
    total = 0
    for name in sorted(found):
        entry = await _describe(sandbox, name)
        if entry is None:
            continue
        if len(chosen.entries) >= MAX_FILES or total + entry.size > MAX_BYTES:
            chosen.truncated = True
            continue
        chosen.entries.append(entry)
        total += entry.size
    return chosen


def _is_inside(path: str, root: PurePosixPath) -> bool:
    """Tell whether a name from inside is one that a zip may hold."""
    pure = PurePosixPath(path)
    return (
        pure.is_relative_to(root)
        and pure != root
        and ".." not in pure.parts
        and "\\" not in path
        and not pure.name.startswith(".cloche-")
    )


async def _describe(sandbox: Sandbox, name: str) -> FileEntry | None:
    # A process that is still at work may remove it meanwhile.
    with contextlib.suppress(NoSuchFile, PathRefused):
        entry = await sandbox.files.stat(name)
        return entry if entry.kind == "file" else None
    return None


async def zipped(sandbox: Sandbox, chosen: Plan) -> AsyncGenerator[bytes, None]:
    """Yield a zip of what was chosen: the same files give the same bytes."""
    outlet = _Outlet()
    with zipfile.ZipFile(outlet, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for entry in chosen.entries:
            adding = _add(sandbox, archive, entry, chosen)
            async with contextlib.aclosing(adding):
                async for _ in adding:
                    if data := outlet.take():
                        yield data
    yield outlet.take()


async def _add(
    sandbox: Sandbox, archive: zipfile.ZipFile, entry: FileEntry, chosen: Plan
) -> AsyncGenerator[None, None]:
    """Stream one file into the zip, and pause after each piece; one that is gone is left out.

    No more than it was when it was described: one that grows meanwhile is cut.
    """
    member = zipfile.ZipInfo(str(PurePosixPath(entry.path).relative_to(chosen.root)), _EPOCH)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = (0o755 if entry.mode & 0o100 else 0o644) << 16
    stream = sandbox.files.stream(entry.path)
    async with contextlib.aclosing(stream):
        try:
            data = await anext(stream, b"")
        except (NoSuchFile, PathRefused):
            return
        chosen.files += 1
        left = entry.size
        with archive.open(member, "w", force_zip64=entry.size >= 1 << 31) as sink:
            while data := data[:left]:
                await asyncio.to_thread(sink.write, data)
                left -= len(data)
                chosen.bytes += len(data)
                yield
                data = await anext(stream, b"")


class _Outlet(io.RawIOBase):
    """Where a zip is written to be sent on at once. It cannot be sought: nothing is kept."""

    def __init__(self) -> None:
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data, self._data = bytes(self._data), bytearray()
        return data


_UNPACK = """
import os, sys, zipfile
source, target = sys.argv[1:]
try:
    with zipfile.ZipFile(source) as archive:
        if len(archive.infolist()) > 100_000:
            sys.exit("it holds more than 100,000 files")
        for member in archive.infolist():
            placed = archive.extract(member, target)
            mode = member.external_attr >> 16 & 0o777
            if mode and not member.is_dir():
                os.chmod(placed, mode | 0o600)
except OSError as error:
    sys.exit(28 if error.errno in (28, 122) else f"{error.strerror}: {error.filename}")
except Exception as error:
    sys.exit(str(error))
"""


async def unpack_zip(
    sandbox: Sandbox, archive: bytes | AsyncIterable[bytes], path: str = "/workspace"
) -> None:
    """Unpack a zip into a folder of the machine.

    Raises:
        BadRequest: it is no zip, or a damaged one.
        MachineFull: the machine's disk does not hold it.
        CommandTimeout: it takes too long.
    """
    draft = f"/tmp/.cloche-{secrets.token_hex(8)}.zip"  # noqa: S108 - in the machine
    await sandbox.files.mkdir(path)
    try:
        await sandbox.files.write(draft, archive)
        done = await sandbox.exec(
            ["python3", "-I", "-c", _UNPACK, draft, path],
            timeout_s=UNPACK_S,
        )
    finally:
        with contextlib.suppress(NoSuchFile):
            await sandbox.files.remove(draft)
    if done.exit_code == 28:
        raise MachineFull(
            "The machine's disk does not hold what is in the archive.",
            remedy="Ask for a larger disk, or send less.",
        )
    if done.exit_code:
        raise BadRequest(
            f"The archive cannot be unpacked: {done.stderr.strip()[:300] or 'it is damaged'}.",
            remedy="Send a zip, or a tar with format=tar.",
        )
