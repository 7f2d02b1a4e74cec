"""Moves and removes folders of file systems, with an eye on what is mounted.

A removal that followed a mount would delete files of the host, and one under a
running machine would pull its files away: both are refused.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from cloche.core.errors import OperatorError, UserError

_MOUNT_POINT_FIELD = 4
_ATTEMPTS = 5
_LINKS = 8


def in_use(folder: Path, layers: Collection[Path]) -> bool:
    """Tell whether one of `layers`, on which machines stand, is `folder` or lies in it."""
    return any(layer.is_relative_to(folder) for layer in layers)


def refuse_if_used(folder: Path, layers: Collection[Path]) -> None:
    """Raise `UserError` if machines run on the image in `folder`."""
    if in_use(folder, layers):
        raise UserError(
            f"Machines are running on the image {folder.name}.",
            remedy="Destroy them first, then try again.",
        )


def remove_tree(folder: Path) -> None:
    """Remove `folder`, unless something is mounted in it."""
    if not folder.exists():
        return
    inside = [point for point in _mount_points() if point.is_relative_to(folder.resolve())]
    if inside:
        raise OperatorError(
            f"{folder} is not removed: something is mounted at {inside[0]}.",
            remedy=f"Unmount it (`umount --recursive {folder}`) and try again.",
        )
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            shutil.rmtree(folder)
        except OSError:
            # The last processes of a killed build may still be writing.
            if attempt == _ATTEMPTS:
                raise
            time.sleep(0.1)
        else:
            return


def discard(folder: Path) -> None:
    """Remove the image in `folder`; nobody sees half of it."""
    doomed = Path(tempfile.mkdtemp(prefix=".removing-", dir=folder.parent))
    folder.rename(doomed)
    remove_tree(doomed)


def publish(staging: Path, folder: Path) -> None:
    """Rename `staging` to `folder`, in place of what is there."""
    # Without this, a power cut after the rename leaves empty files under a valid name.
    os.sync()
    if not folder.exists():
        staging.rename(folder)
        return
    doomed = Path(tempfile.mkdtemp(prefix=".removing-", dir=folder.parent))
    folder.rename(doomed)
    staging.rename(folder)
    remove_tree(doomed)


def is_whole(root: Path, entry: str) -> bool:
    """Tell whether `entry` leads to a folder or a file with content, in the root file system."""
    for _ in range(_LINKS):
        path = root / entry
        try:
            if not path.is_symlink():
                status = path.stat()
                return stat.S_ISDIR(status.st_mode) or status.st_size > 0
            # A leading slash is the machine's, not this host's.
            target = Path("/", entry).parent / path.readlink()
            entry = os.path.normpath(target).lstrip("/")
        except OSError:
            return False
    return False


def size_bytes(folder: Path) -> int:
    """Return what `folder` takes on the disk, hard links counted once."""
    seen: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in names)):  # noqa: PTH118 - 60,000 files
            status = os.lstat(path)
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def _mount_points() -> Iterator[Path]:
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
        # The kernel writes blanks and backslashes in octal: proc_pid_mountinfo(5).
        escaped = line.split(" ")[_MOUNT_POINT_FIELD]
        yield Path(escaped.encode().decode("unicode_escape"))
