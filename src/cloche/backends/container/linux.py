"""The mount system calls and ioctls that Python's standard library does not offer."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)

# New system calls have one number on every architecture.
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442

_CLONE_NEWNS = 0x20000
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4

_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_NOSUID = 0x2
_MOUNT_ATTR_NODEV = 0x4
_MOUNT_ATTR_IDMAP = 0x100000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOATIME = 0x400
MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000

_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_AUTOCLEAR = 4
_LOOP_CONFIG_BYTES = 304
_LOOP_FLAGS_AT = 60
"""Where `info.lo_flags` lies in `struct loop_config`."""


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def leave_mount_namespace() -> None:
    """Give the calling *thread* a mount namespace of its own, cut off from the host's."""
    checked(libc.unshare(_CLONE_NEWNS), "unshare")
    checked(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "/")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    checked(
        libc.mount(
            source.encode(), os.fsencode(target), kind.encode(), flags, options.encode() or None
        ),
        f"{kind} on {target}",
    )


def mount_idmapped(source: str, target: str, user_namespace: int) -> None:
    """Bind `source` read-only with every owner shifted into `user_namespace`."""
    tree = checked(
        libc.syscall(
            _SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
        ),
        source,
    )
    try:
        attributes = _MountAttr(
            attr_set=_MOUNT_ATTR_IDMAP
            | _MOUNT_ATTR_RDONLY
            | _MOUNT_ATTR_NOSUID
            | _MOUNT_ATTR_NODEV,
            userns_fd=user_namespace,
        )
        checked(
            libc.syscall(
                _SYS_MOUNT_SETATTR,
                tree,
                b"",
                _AT_EMPTY_PATH,
                ctypes.byref(attributes),
                ctypes.sizeof(attributes),
            ),
            f"id-mapped mount of {source}",
        )
        checked(
            libc.syscall(
                _SYS_MOVE_MOUNT,
                tree,
                b"",
                _AT_FDCWD,
                os.fsencode(target),
                _MOVE_MOUNT_F_EMPTY_PATH,
            ),
            target,
        )
    finally:
        os.close(tree)


def attach_loop(backing: int) -> tuple[int, str]:
    """Bind a file to a free loop device that frees itself when it is unmounted.

    Returns the device, open, and its path; close it once it is mounted.
    """
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(64):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            config = bytearray(_LOOP_CONFIG_BYTES)
            struct.pack_into("I", config, 0, backing)
            struct.pack_into("I", config, _LOOP_FLAGS_AT, _LO_FLAGS_AUTOCLEAR)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, bytes(config))
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # EBUSY: another process was faster.
                    raise
            else:
                return device, path
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "every loop device is taken as soon as it is found", "/dev/loop*")
