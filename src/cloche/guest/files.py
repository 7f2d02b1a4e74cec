"""File calls, made with the user's rights and inside the user's folders."""

from __future__ import annotations

import binascii
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
COLUMNS = 2000
"""Characters of a line found; some files are one line."""
LINE_BYTES = 1024 * 1024
"""What ripgrep may say of one line found; a longer one is left out, and that is told."""

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
            try:
                os.close(paths.open_path(path, os.O_PATH | os.O_DIRECTORY))
            except NotADirectoryError:
                raise FileExistsError(errno.EEXIST, "A file is there", path) from None


async def move(exchange: Exchange) -> None:
    await paths.as_user(_move, _path(exchange), _path(exchange, "to"))
    await exchange.answer({})


def _move(source: str, target: str) -> None:
    with _parent(source) as (folder, name), _parent(target) as (to_folder, to_name):
        try:
            os.rename(name, to_name, src_dir_fd=folder, dst_dir_fd=to_folder)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            message = f"{source!r} and {target!r} are on different file systems"
            raise Refusal(409, "file_refused", message) from None


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
    found, truncated = await paths.as_user(_glob, _path(exchange), pattern)
    await exchange.answer({"paths": found, "truncated": truncated})


def _glob(path: str, pattern: str) -> tuple[list[str], bool]:
    matches = _translate(pattern)
    found: list[str] = []
    truncated = False
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as top:
        for count, relative in enumerate(_walk(top)):
            if matches(relative):
                found.append(_shown(posixpath.join(path, relative)))
            if truncated := len(found) > LISTED or count > WALKED:
                break
    return sorted(found[:LISTED]), truncated


def _walk(top: int) -> Iterator[str]:
    """Yield every path below a folder, links listed and never followed."""
    for prefix, folders, names, _ in os.fwalk(".", dir_fd=top, follow_symlinks=False):
        folders.sort()
        for name in sorted([*folders, *names]):
            yield posixpath.normpath(posixpath.join(prefix, name))


def _translate(pattern: str) -> Callable[[str], object]:
    """Compile a glob: `*` and `?` stay within one name, a name `**` is any number of folders."""
    if not pattern or len(pattern) > 1024 or pattern.startswith("/") or "\0" in pattern:
        raise bad_request("pattern is a relative glob of at most 1024 characters")
    # Names between two `**` are found at the first place they fit, and for good: a later
    # place would do no better. So no pattern makes the search retrace its steps for ever.
    runs: list[list[str]] = [[]]
    for name in pattern.split("/"):
        if name != "**":
            runs[-1].append(_translate_name(name))
        elif len(runs) == 1 or runs[-1]:
            runs.append([])
    first, *middle, last = runs if len(runs) > 1 else [[], *runs]
    expression = "".join(f"{name}/" for name in first)
    for run in middle:
        expression += f"(?>(?:[^/]+/)*?{''.join(f'{name}/' for name in run)})"
    if len(runs) > 1:
        expression += "(?:[^/]+/)*"
    expression += "/".join(last) or "[^/]+"
    try:
        return re.compile(expression, re.DOTALL).fullmatch
    except re.error as error:
        raise bad_request(f"bad glob {pattern!r}: {error}") from None


def _translate_name(pattern: str) -> str:
    parts = [""]
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "[" and (end := pattern.find("]", position + 2)) > 0:
            parts[-1] += _translate_class(pattern[position + 1 : end])
            position = end
        elif character == "*":
            if parts[-1] or len(parts) == 1:
                parts.append("")
        else:
            parts[-1] += "[^/]" if character == "?" else re.escape(character)
        position += 1
    first, *middle, last = parts if len(parts) > 1 else ["", *parts]
    expression = first + "".join(f"(?>[^/]*?{part})" for part in middle)
    return expression + ("[^/]*" if len(parts) > 1 else "") + last


def _translate_class(body: str) -> str:
    negated = body[0] in "!^"
    # What is special to `re` alone: a backslash, and the doubled signs it reserves.
    escaped = re.sub(r"[\\\[&~|]|(?<=-)-", r"\\\g<0>", body[1:] if negated else body)
    return f"(?!/)[{'^' if negated else ''}{escaped}]"


async def grep(exchange: Exchange, table: Table) -> None:
    """Search file contents with ripgrep, whose patterns cannot run away."""
    path = _path(exchange)
    await paths.as_user(_check, path)
    argv = ["/usr/bin/rg", "--json", "--no-config", "--no-messages", "--hidden"]
    argv += ["--fixed-strings"] if exchange.query.get("fixed") == "1" else []
    argv += ["--ignore-case"] if exchange.query.get("ignore_case") == "1" else []
    argv += [f"--glob={exchange.query['glob']}"] if "glob" in exchange.query else []
    argv += ["--regexp", exchange.query.get("pattern", ""), "--", path]
    limit = number(exchange, "limit", 1000, 1, LISTED)
    found: list[dict[str, Any]] = []
    rest, too_long, left_out = b"", False, False
    try:
        async with contextlib.aclosing(table.tool(argv, "/")) as output:
            async for data in output:
                *lines, rest = (rest + data).split(b"\n")
                if too_long and lines:
                    del lines[0]  # The end of it.
                    too_long = False
                if len(rest) > LINE_BYTES:
                    rest, too_long, left_out = b"", True, True
                found += filter(None, map(_match, lines))
                if len(found) > limit:
                    break
    except ToolFailed as failure:
        # 1: nothing found. 2 without a word: some file could not be read.
        if failure.exit_code != 1 and failure.said:
            raise bad_request(failure.message) from None
    truncated = left_out or len(found) > limit
    await exchange.answer({"matches": found[:limit], "truncated": truncated})


def _match(line: bytes) -> dict[str, Any] | None:
    event = json.loads(line)
    if event["type"] != "match":
        return None
    return {
        "path": _text(event["data"]["path"]),
        "line": event["data"]["line_number"],
        "text": _text(event["data"]["lines"]).rstrip("\n")[:COLUMNS],
    }


def _text(field: dict[str, str]) -> str:
    """Read ripgrep's text, which comes in Base64 when it is not UTF-8."""
    if "text" in field:
        return field["text"]
    return binascii.a2b_base64(field["bytes"]).decode(errors="replace")


async def tar_out(exchange: Exchange, table: Table) -> None:
    path = _path(exchange)
    await paths.as_user(_check, path)
    folder, name = posixpath.split(posixpath.normpath(path))
    argv = ["/usr/bin/tar", "--create", "--file=-", "--sparse", "--ignore-failed-read"]
    try:
        # Closed here and now when the host leaves: nobody else would end the packer.
        async with contextlib.aclosing(table.tool([*argv, "--", name], folder)) as stream:
            first = await anext(stream, b"")
            await exchange.begin(200, [("transfer-encoding", "chunked")], "application/x-tar")
            await exchange.send(first)
            async for data in stream:
                await exchange.send(data)
    except ToolFailed as failure:
        if failure.exit_code != 1:  # 1: some file changed while it was read.
            raise
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
