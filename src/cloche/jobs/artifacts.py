"""What a job leaves behind, as one zip: deterministic, bounded, and built from hostile names."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zipfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cloche.core.blobs import Blobs, artifacts_key
from cloche.core.errors import NoSuchFile, PathRefused
from cloche.core.files import FileEntry
from cloche.sandbox.sandbox import Sandbox

MAX_FILES = 10_000
MAX_BYTES = 2 << 30
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest moment a zip can tell: equal files make equal zips."""
_WORKSPACE = PurePosixPath("/workspace")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was kept, and whether something had to be left out."""

    files: int
    bytes: int
    truncated: bool


async def keep(
    sandbox: Sandbox, patterns: Sequence[str], blobs: Blobs, drafts: Path, job_id: str
) -> Collected:
    """Zip what the patterns match below /workspace and put it into `blobs`; no file, no zip.

    Raises:
        SandboxLost, GuestMisbehaved: the machine is gone, or lies.
        StoreUnavailable: the zip cannot be kept.
    """
    draft = drafts / f"{job_id}-{secrets.token_hex(4)}.zip"
    try:
        kept = await collect(sandbox, patterns, draft)
        if kept.files:
            await blobs.put(artifacts_key(job_id), _pieces(draft))
    finally:
        draft.unlink(missing_ok=True)
    return kept


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield data


async def collect(sandbox: Sandbox, patterns: Sequence[str], target: Path) -> Collected:
    """Zip what the patterns match below /workspace into `target`; no file, no zip.

    Raises:
        SandboxLost, GuestMisbehaved: the machine is gone, or lies.
    """
    names, truncated = await _names(sandbox, patterns)
    entries = [entry for name in names if (entry := await _describe(sandbox, name))]
    if not entries:
        return Collected(files=0, bytes=0, truncated=truncated)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(".part")
    files = total = 0
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for entry in entries:
                if files >= MAX_FILES or total + entry.size > MAX_BYTES:
                    truncated = True
                    continue
                written = await _add(sandbox, archive, entry)
                files, total = files + (written is not None), total + (written or 0)
        draft.rename(target)
    finally:
        draft.unlink(missing_ok=True)
    return Collected(files=files, bytes=total, truncated=truncated)


async def _names(sandbox: Sandbox, patterns: Sequence[str]) -> tuple[list[str], bool]:
    found: set[str] = set()
    truncated = False
    for pattern in patterns:
        matched = await sandbox.files.glob(pattern, str(_WORKSPACE))
        found.update(path for path in matched.paths if _is_inside(path))
        truncated |= matched.truncated
    return sorted(found), truncated


def _is_inside(path: str) -> bool:
    """Tell whether a name from inside is one that a zip may hold."""
    pure = PurePosixPath(path)
    return (
        pure.is_relative_to(_WORKSPACE)
        and pure != _WORKSPACE
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


async def _add(sandbox: Sandbox, archive: zipfile.ZipFile, entry: FileEntry) -> int | None:
    """Stream one file into the zip; return how much it took, or None when it is gone.

    No more than it was when it was described: one that grows meanwhile is cut.
    """
    path = PurePosixPath(entry.path).relative_to(_WORKSPACE)
    member = zipfile.ZipInfo(str(path), _EPOCH)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = (0o755 if entry.mode & 0o100 else 0o644) << 16
    written = 0
    stream = sandbox.files.stream(entry.path)
    async with contextlib.aclosing(stream):
        try:
            data = await anext(stream, b"")
        except (NoSuchFile, PathRefused):
            return None
        with archive.open(member, "w", force_zip64=entry.size >= 1 << 31) as sink:
            while data := data[: entry.size - written]:
                await asyncio.to_thread(sink.write, data)
                written += len(data)
                data = await anext(stream, b"")
    return written
