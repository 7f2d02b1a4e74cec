"""File calls, made with the user's rights and inside the user's folders."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import re
import stat as modes
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cloche.guest import paths
from cloche.guest.http import READ_BYTES, Exchange, Refusal, bad_request, number
from cloche.guest.processes import Table, ToolFailed

LISTED = 10_000
"""Entries in one answer; a caller that wants more narrows the question."""
WALKED = 200_000
NAME_MAX = 255

_KINDS = {
    modes.S_IFREG: "file",
    modes.S_IFDIR: "folder",
    modes.S_IFLNK: "link",
}


def _path(exchange: Exchange, name: str = "path") -> str:
    try:
        return exchange.query[name]
    except KeyError:
        raise bad_request(f"{name} is missing") from None


def _shown(path: str) -> str:
    """Spell a path in valid Unicode: a name's bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode(errors="replace")


def _describe(path: str, found: os.stat_result) -> dict[str, Any]:
    return {
        "path": _shown(path),
        "kind": _KINDS.get(modes.S_IFMT(found.st_mode), "other"),
        "size": found.st_size,
        "mode": modes.S_IMODE(found.st_mode),
        "modified_at": found.st_mtime,
    }


async def stat(exchange: Exchange) -> None:
    await exchange.answer(await paths.as_user(_stat, _path(exchange)))


def _stat(path: str) -> dict[str, Any]:
    if paths.split(path)[1] == ".":
        return _describe(path, os.stat(path))  # noqa: PTH116 - pathlib is not loaded
    with _parent(path) as (folder, name):
        return _describe(path, os.stat(name, dir_fd=folder, follow_symlinks=False))


async def list_folder(exchange: Exchange) -> None:
    entries = await paths.as_user(_list, _path(exchange))
    await exchange.answer({"entries": entries[:LISTED], "truncated": len(entries) > LISTED})


def _list(path: str) -> list[dict[str, Any]]:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder, os.scandir(folder) as found:
        entries = []
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                described = entry.stat(follow_symlinks=False)
                entries.append(_describe(posixpath.join(path, entry.name), described))
            if len(entries) > LISTED:
                break
    return sorted(entries, key=lambda entry: str(entry["path"]))


async def read(exchange: Exchange) -> None:
    """Send a range of a file; the size of the whole comes in a header."""
    offset = number(exchange, "offset", 0, 0, sys.maxsize)
    limit = number(exchange, "limit", sys.maxsize, 0, sys.maxsize)
    descriptor, size = await paths.as_user(_open_to_read, _path(exchange))
    try:
        length = max(0, min(limit, size - offset))
        headers = [("content-length", str(length)), ("x-file-size", str(size))]
        await exchange.begin(200, headers, "application/octet-stream")
        while length:
            data = await paths.as_user(os.pread, descriptor, min(length, READ_BYTES * 4), offset)
            if not data:  # It shrank meanwhile: cut the answer short, so that it shows.
                return
            await exchange.send(data)
            offset += len(data)
            length -= len(data)
        await exchange.end()
    finally:
        os.close(descriptor)


def _open_to_read(path: str) -> tuple[int, int]:
    # O_NONBLOCK keeps a named pipe from holding the thread for ever.
    descriptor = paths.open_path(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    found = os.fstat(descriptor)
    if not modes.S_ISREG(found.st_mode):
        os.close(descriptor)
        kind = _KINDS.get(modes.S_IFMT(found.st_mode), "special file")
        raise Refusal(409, "file_refused", f"{path!r} is a {kind}, not a file")
    return descriptor, found.st_size


async def write(exchange: Exchange) -> None:
    """Replace a file in one go: readers see the old one or the new one, never a part."""
    path = _path(exchange)
    mode = number(exchange, "mode", 0o644, 0, 0o777)
    folder, name, temporary, descriptor = await paths.as_user(
        _begin_write, path, exchange.query.get("parents") == "1"
    )
    try:
        try:
            async for data in exchange.body():
                await paths.as_user(_write_all, descriptor, data)
            await paths.as_user(os.fchmod, descriptor, mode)
        finally:
            os.close(descriptor)
        await paths.as_user(_put_in_place, folder, temporary, name)
    except BaseException:
        paths.in_background(_unlink_quietly, os.dup(folder), temporary)
        raise
    finally:
        os.close(folder)
    await exchange.answer({})


def _begin_write(path: str, parents: bool) -> tuple[int, str, str, int]:
    if parents:
        _mkdir(posixpath.dirname(posixpath.normpath(path)), parents=True)
    folder, name = paths.open_parent(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            if modes.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise IsADirectoryError(errno.EISDIR, "Is a folder", path)
        temporary = f"{paths.SCRIPT_PREFIX}{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return folder, name, temporary, os.open(temporary, flags, 0o600, dir_fd=folder)
    except BaseException:
        os.close(folder)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _put_in_place(folder: int, temporary: str, name: str) -> None:
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _unlink_quietly(folder: int, name: str) -> None:
    try:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


async def mkdir(exchange: Exchange) -> None:
    path, parents = _path(exchange), exchange.query.get("parents") == "1"
    await paths.as_user(_mkdir, path, parents)
    await exchange.answer({})


def _mkdir(path: str, parents: bool) -> None:
    root, rest = paths.split(path)
    if rest == ".":
        if parents:
            return
        raise FileExistsError(errno.EEXIST, "File exists", path)
    if parents:
        _mkdir(posixpath.join(root, posixpath.dirname(rest)), parents=True)
    with _parent(path) as (folder, name):
        try:
            os.mkdir(name, 0o755, dir_fd=folder)
        except FileExistsError:
            if not parents:
                raise
            with _opened(path, os.O_PATH | os.O_DIRECTORY):
                pass


async def move(exchange: Exchange) -> None:
    await paths.as_user(_move, _path(exchange), _path(exchange, "to"))
    await exchange.answer({})


def _move(source: str, target: str) -> None:
    with _parent(source) as (folder, name), _parent(target) as (to_folder, to_name):
        os.rename(name, to_name, src_dir_fd=folder, dst_dir_fd=to_folder)


async def remove(exchange: Exchange) -> None:
    path, recursive = _path(exchange), exchange.query.get("recursive") == "1"
    await paths.as_user(_remove, path, recursive)
    await exchange.answer({})


def _remove(path: str, recursive: bool) -> None:
    with _parent(path) as (folder, name):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not modes.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=folder)
        elif recursive:
            import shutil  # noqa: PLC0415 - loaded by the few who need it

            shutil.rmtree(name, dir_fd=folder)
        else:
            os.rmdir(name, dir_fd=folder)


async def glob(exchange: Exchange) -> None:
    pattern = exchange.query.get("pattern", "")
    found = await paths.as_user(_glob, _path(exchange), pattern)
    await exchange.answer({"paths": found[:LISTED], "truncated": len(found) > LISTED})


def _glob(path: str, pattern: str) -> list[str]:
    matches = _translate(pattern)
    found: list[str] = []
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as top:
        for count, relative in enumerate(_walk(top)):
            if matches(relative):
                found.append(_shown(posixpath.join(path, relative)))
            if len(found) > LISTED or count > WALKED:
                break
    return sorted(found)


def _walk(top: int) -> Iterator[str]:
    """Yield every path below a folder, links listed and never followed."""
    for prefix, folders, names, _ in os.fwalk(".", dir_fd=top, follow_symlinks=False):
        folders.sort()
        for name in sorted([*folders, *names]):
            yield posixpath.normpath(posixpath.join(prefix, name))


def _translate(pattern: str) -> Callable[[str], object]:
    """Compile a glob: `*` and `?` stay within one name, `**` crosses folders."""
    if not pattern or len(pattern) > 1024 or pattern.startswith("/") or "\0" in pattern:
        raise bad_request("pattern is a relative glob of at most 1024 characters")
    expression = ""
    position = 0
    while position < len(pattern):
        if pattern.startswith("**/", position):
            expression += "(?:[^/]+/)*"
            position += 3
        elif pattern.startswith("**", position):
            expression += ".*"
            position += 2
        elif (end := pattern.find("]", position + 2)) > 0 and pattern[position] == "[":
            body = pattern[position + 1 : end].replace("\\", r"\\").replace("[", r"\[")
            expression += f"[{'^' + body[1:] if body[0] in '!^' else body}]"
            position = end + 1
        else:
            expression += {"*": "[^/]*", "?": "[^/]"}.get(
                pattern[position], re.escape(pattern[position])
            )
            position += 1
    try:
        return re.compile(expression, re.DOTALL).fullmatch
    except re.error as error:
        raise bad_request(f"bad glob {pattern!r}: {error}") from None


async def grep(exchange: Exchange, table: Table) -> None:
    """Search file contents with ripgrep, whose patterns cannot run away."""
    path = _path(exchange)
    await paths.as_user(_check, path)
    argv = ["/usr/bin/rg", "--json", "--no-config", "--hidden", "--max-columns=2000"]
    argv += ["--fixed-strings"] if exchange.query.get("fixed") == "1" else []
    argv += ["--ignore-case"] if exchange.query.get("ignore_case") == "1" else []
    argv += [f"--glob={exchange.query['glob']}"] if "glob" in exchange.query else []
    argv += ["--regexp", exchange.query.get("pattern", ""), "--", path]
    limit = number(exchange, "limit", 1000, 1, LISTED)
    found: list[dict[str, Any]] = []
    rest = b""
    try:
        async for data in table.tool(argv, "/"):
            *lines, rest = (rest + data).split(b"\n")
            found += filter(None, map(_match, lines))
            if len(found) > limit:
                break
    except ToolFailed as failure:
        if failure.exit_code != 1:  # 1: nothing found
            raise bad_request(failure.message) from None
    await exchange.answer({"matches": found[:limit], "truncated": len(found) > limit})


def _match(line: bytes) -> dict[str, Any] | None:
    event = json.loads(line)
    if event["type"] != "match":
        return None
    return {
        "path": event["data"]["path"].get("text", ""),
        "line": event["data"]["line_number"],
        "text": event["data"]["lines"].get("text", "").rstrip("\n"),
    }


async def tar_out(exchange: Exchange, table: Table) -> None:
    path = _path(exchange)
    await paths.as_user(_check, path)
    folder, name = posixpath.split(posixpath.normpath(path))
    argv = ["/usr/bin/tar", "--create", "--file=-", "--sparse", "--", name]
    stream = table.tool(argv, folder)
    first = await anext(stream, b"")
    await exchange.begin(200, [("transfer-encoding", "chunked")], "application/x-tar")
    await exchange.send(first)
    async for data in stream:
        await exchange.send(data)
    await exchange.end()


async def tar_in(exchange: Exchange, table: Table) -> None:
    path = _path(exchange)
    await paths.as_user(_mkdir, path, True)
    await paths.as_user(_check, path)
    argv = ["/usr/bin/tar", "--extract", "--file=-", "--no-same-owner", "--no-same-permissions"]
    async for _ in table.tool(argv, path, exchange.body()):
        pass
    await exchange.answer({})


def _check(path: str) -> None:
    os.close(paths.open_path(path, os.O_PATH))


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = paths.open_path(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    folder, name = paths.open_parent(path)
    try:
        yield folder, name
    finally:
        os.close(folder)
