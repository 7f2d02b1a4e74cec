"""The few system calls that Python's standard library does not offer."""

from __future__ import annotations

import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_DUMPABLE = 4

_OPEN_TRIES = 1000
_SYS_OPENAT2 = 437  # The same number on every architecture: it is newer than their split.
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02

IN_NONBLOCK = os.O_NONBLOCK
IN_CLOEXEC = os.O_CLOEXEC


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def hide_from_ptrace() -> None:
    """Keep memory and /proc entries from every process without CAP_SYS_PTRACE."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def act_as(uid: int, gid: int) -> None:
    """Let the kernel judge this *thread's* file calls as if `uid` made them.

    setfsuid, not setuid: it is per thread, drops the file capabilities with it,
    and leaves the process out of reach of that user's signals.
    """
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    # Neither call reports failure; a second one returns the identity in force.
    if _libc.setfsgid(-1) != gid or _libc.setfsuid(-1) != uid:
        raise PermissionError(f"cannot act as uid {uid}, gid {gid}")


def open_beneath(folder: int, path: str, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """Open `path` below `folder`; the kernel refuses every way out of it (EXDEV, ELOOP)."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve | RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    opened = -1
    for _ in range(_OPEN_TRIES):
        opened = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_long(folder),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        # openat2(2): EAGAIN when a `..` was passed while something was renamed, anywhere on
        # the host; to be tried again.
        if opened >= 0 or ctypes.get_errno() != errno.EAGAIN:
            break
    return _checked(opened, path)


def punch_hole(descriptor: int, offset: int, length: int) -> None:
    """Give the blocks of a range back to the file system; what lies behind stays in place."""
    _checked(
        _libc.fallocate(
            ctypes.c_int(descriptor),
            ctypes.c_int(_FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE),
            ctypes.c_int64(offset),
            ctypes.c_int64(length),
        ),
        "fallocate",
    )


def inotify_init() -> int:
    return _checked(_libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC), "inotify")


def inotify_add_watch(descriptor: int, path: str, mask: int) -> int:
    return _checked(
        _libc.inotify_add_watch(descriptor, ctypes.c_char_p(os.fsencode(path)), mask), path
    )
