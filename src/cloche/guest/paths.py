"""Where the machine's user may touch files, and how the guest touches them in their name.

Every call runs on threads that act as uid 1000, so the kernel judges it as it
would judge the user; and every path is resolved by openat2 below one of the
`ROOTS`, so no link and no `..` leads out, however fast it is swapped.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from collections.abc import Callable
from typing import Any, TypeVar

from cloche.guest import linux
from cloche.guest.http import Refusal, bad_request
from cloche.guest.threads import Threads

UID = GID = 1000
ROOTS = ("/workspace", "/home/user", "/tmp")  # noqa: S108 - a place, not a file
SCRIPT_PREFIX = ".cloche-"

T = TypeVar("T")

_threads = Threads(4, lambda: linux.act_as(UID, GID))
_background: set[asyncio.Future[Any]] = set()


async def as_user(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call with the user's rights; refuse in the host's words when it fails."""
    try:
        return await _threads.run(function, *arguments)
    except OSError as error:
        raise refusal(error) from None


def in_background(function: Callable[..., T], *arguments: Any) -> None:
    future = _threads.run(function, *arguments)
    _background.add(future)  # The loop itself holds futures only weakly.
    future.add_done_callback(_background.discard)


def refusal(error: OSError) -> Refusal:
    where = f"{error.filename!r}: " if error.filename is not None else ""
    message = f"{where}{error.strerror}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Refusal(404, "no_such_file", message)
    if error.errno in (errno.EXDEV, errno.ELOOP):
        return Refusal(403, "path_refused", f"{where}leads out of {', '.join(ROOTS)}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Refusal(403, "path_refused", message)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return Refusal(507, "machine_full", message)
    return Refusal(409, "file_refused", message)


def split(path: str) -> tuple[str, str]:
    """Return the root that `path` lies in, and the rest of it relative to that root."""
    if "\0" in path or not path.startswith("/"):
        raise bad_request("a path is absolute and holds no NUL")
    plain = posixpath.normpath(path)
    # POSIX lets a path begin with exactly two slashes, and normpath keeps them.
    plain = "/" + plain.lstrip("/")
    for root in ROOTS:
        if plain == root or plain.startswith(root + "/"):
            return root, plain[len(root) + 1 :] or "."
    raise Refusal(403, "path_refused", f"{path!r} lies outside {', '.join(ROOTS)}")


def open_path(path: str, flags: int, mode: int = 0o644) -> int:
    """Open a path inside the roots, following links as long as they stay inside."""
    root, rest = split(path)
    try:
        return _open_in(root, rest, flags, mode)
    except OSError as error:
        if error.errno != errno.EXDEV or flags & os.O_NOFOLLOW:
            raise
    # An absolute link is EXDEV for the kernel even when it stays inside. Where it
    # leads is looked up once more, and that way may hold no further link.
    root, rest = split(os.path.realpath(path))
    return _open_in(root, rest, flags, mode, linux.RESOLVE_NO_SYMLINKS)


def open_parent(path: str) -> tuple[int, str]:
    """Open the folder that holds `path`; return it with the last part of the name."""
    root, rest = split(path)
    if rest == ".":
        raise Refusal(403, "path_refused", f"{root} itself cannot be replaced or removed")
    head, name = posixpath.split(rest)
    return open_path(posixpath.join(root, head), os.O_PATH | os.O_DIRECTORY), name


def _open_in(root: str, rest: str, flags: int, mode: int, resolve: int = 0) -> int:
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        creates = flags & os.O_CREAT
        return linux.open_beneath(folder, rest, flags, mode if creates else 0, resolve)
    finally:
        os.close(folder)


async def write_script(cwd: str, process_id: str, script: object) -> str:
    """Store code beside the user's files, where its imports resolve; return the path."""
    if not isinstance(script, dict):
        raise bad_request("script holds code and suffix")
    code, suffix = script.get("code"), script.get("suffix")
    if not isinstance(code, str) or suffix not in (".py", ".ts", ".js", ".sh"):
        raise bad_request("script holds code, and suffix: .py, .ts, .js or .sh")
    path = posixpath.join(cwd, f"{SCRIPT_PREFIX}{process_id}{suffix}")
    try:
        await as_user(_write_new, path, code.encode("utf-8", "surrogatepass"))
    except Refusal:
        in_background(remove_quietly, path)  # Half of it, on a full disk.
        raise
    return path


def _write_new(path: str, data: bytes) -> None:
    descriptor = open_path(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def remove_quietly(path: str) -> None:
    """Remove a script that its own code may have moved or removed already."""
    try:
        folder, name = open_parent(path)
    except (OSError, Refusal):
        return
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return
    finally:
        os.close(folder)
