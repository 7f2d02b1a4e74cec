"""Tells what changes below a folder, as it happens."""

from __future__ import annotations

import asyncio
import os
import posixpath
import struct

from cloche.guest import linux, paths
from cloche.guest.http import HEARTBEAT_S, Exchange, Refusal

FOLDERS = 4096

_MODIFY, _ATTRIB, _CLOSE_WRITE = 0x2, 0x4, 0x8
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _ONLYDIR, _DONT_FOLLOW = 0x4000, 0x8000, 0x1000000, 0x2000000
_ISDIR = 0x40000000
_MASK = _CLOSE_WRITE | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_WORDS = (
    (_CREATE, "created"),
    (_MOVED_TO, "created"),
    (_DELETE, "removed"),
    (_MOVED_FROM, "removed"),
    (_CLOSE_WRITE, "changed"),
    (_ATTRIB, "changed"),
)


class _Watch:
    """One inotify descriptor over a folder and all that is below it."""

    def __init__(self, top: str) -> None:
        self.descriptor = linux.inotify_init()
        self._folders: dict[int, str] = {}
        try:
            self._add(top)
        except BaseException:
            os.close(self.descriptor)
            raise

    def _add(self, top: str) -> list[str]:
        """Watch a folder and those below; return what was found in them.

        A folder below that vanishes meanwhile, or may not be read, is no error.
        """
        found: list[str] = []
        unseen = [top]
        while unseen:
            folder = unseen.pop()
            if len(self._folders) >= FOLDERS:
                raise Refusal(507, "machine_full", f"a watch covers at most {FOLDERS} folders")
            try:
                # Watched before it is read: what comes in between is told twice, not never.
                number = linux.inotify_add_watch(
                    self.descriptor, folder, _MASK | _ONLYDIR | _DONT_FOLLOW
                )
                self._folders[number] = folder
                with os.scandir(folder) as entries:
                    for entry in entries:
                        found.append(entry.path)
                        if entry.is_dir(follow_symlinks=False):
                            unseen.append(entry.path)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                if folder == top:
                    raise
        return found

    def read(self) -> list[dict[str, object]]:
        try:
            raw = os.read(self.descriptor, 65536)
        except BlockingIOError:
            return []
        events: list[dict[str, object]] = []
        while raw:
            number, mask, _, length = struct.unpack_from("iIII", raw)
            name = raw[16 : 16 + length].rstrip(b"\0")
            raw = raw[16 + length :]
            if mask & _OVERFLOW:
                events.append({"change": "overflow", "path": ""})
            elif mask & _IGNORED:
                self._folders.pop(number, None)
            elif number in self._folders:
                path = posixpath.join(self._folders[number], os.fsdecode(name))
                word = next(word for bit, word in _WORDS if mask & bit)
                events.append({"change": word, "path": _shown(path)})
                if mask & _ISDIR and mask & (_CREATE | _MOVED_TO):
                    events += self._arrived(path)
        return events

    def _arrived(self, folder: str) -> list[dict[str, object]]:
        """Watch a new folder, and tell what was put into it before it was watched."""
        try:
            found = self._add(folder)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []  # It is gone, or something else, already.
        except (OSError, Refusal):  # One folder too many: from now on, changes are missed.
            return [{"change": "overflow", "path": ""}]
        return [{"change": "created", "path": _shown(path)} for path in found]


def _shown(path: str) -> str:
    return os.fsencode(path).decode(errors="replace")


def _find(path: str) -> str:
    """Return where a folder really is, once the links on the way to it are followed."""
    opened = paths.open_path(path, os.O_PATH | os.O_DIRECTORY)
    try:
        return os.readlink(f"/proc/self/fd/{opened}")  # noqa: PTH115 - pathlib is not loaded
    finally:
        os.close(opened)


async def watch(exchange: Exchange) -> None:
    top = await paths.as_user(_find, exchange.query.get("path", ""))
    observer = await paths.as_user(_Watch, top)
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(observer.descriptor, ready.set)
    try:
        await exchange.begin_lines({"watching": _shown(top)})
        while not exchange.reader.at_eof():
            try:
                await asyncio.wait_for(ready.wait(), HEARTBEAT_S)
            except TimeoutError:
                await exchange.line({"alive": True})
                continue
            ready.clear()
            for event in await paths.as_user(observer.read):
                await exchange.line(event)
    finally:
        loop.remove_reader(observer.descriptor)
        os.close(observer.descriptor)
