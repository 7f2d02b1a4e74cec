"""Who a machine belongs to, told by a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


class Owner:
    """This process, as the owner of machines, for as long as it lives."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = secrets.token_hex(8)
        self._path = folder / self.name
        # Close-on-exec, so that no child holds it on.
        self._lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._lock)


def is_alive(folder: Path, name: str) -> bool:
    """Return whether the process that took `name` still lives; forget it when it does not."""
    if is_locked(folder / name):
        return True
    (folder / name).unlink(missing_ok=True)
    return False


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock at `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def turn(lock: Path) -> Iterator[bool]:
    """Yield whether nobody else has the turn; if so, it is ours until the block ends."""
    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
