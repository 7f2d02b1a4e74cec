"""Starts a machine's first process in a mount namespace that only the machine knows.

All of it happens on one thread, made for the purpose and thrown away: a thread
can leave its process's mount namespace, build the machine's file system in a
fresh one, and start the OCI runtime from there. When the thread and the runtime
are gone, only the machine's processes hold that namespace; when they die, the
kernel takes every mount and the loop device with it. Nothing is ever mounted
where the host could see it, so a `kill -9` of this program leaves no mount.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloche.backends.container import linux
from cloche.backends.container.bundle import IDS
from cloche.backends.container.user_namespace import open_user_namespace

STAGE = Path("/run/cloche")
"""Where the machine's mounts are put together. On the host itself it is an empty folder."""

_LISTEN_FD = 3
_LOCK_FD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What it takes to bring one machine up."""

    command: Sequence[str]
    """The OCI runtime and its arguments."""
    layers: Sequence[Path]
    disk: Path
    first_id: int
    listener: int
    """The guest's channel; becomes its file descriptor 3."""
    lock: int
    """Held open by the runtime while it works, so that a sweep waits for it."""
    log: Path


def rootfs() -> str:
    return str(STAGE / "rootfs")


def user_namespace() -> str:
    return str(STAGE / "user")


async def launch(order: Launch) -> tuple[int, str]:
    """Run the OCI runtime; return its exit code and the machine's loop device.

    Raises:
        OSError: the kernel refused a mount; its file name says which.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[int, str]] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        # The waiting side may have been cancelled, or its loop closed, meanwhile.
        loop.call_soon_threadsafe(lambda: None if done.done() else act())

    def body() -> None:
        try:
            result = _launch(order)
        except BaseException as error:
            failure = error
            settle(lambda: done.set_exception(failure))
        else:
            settle(lambda: done.set_result(result))

    thread = threading.Thread(target=body, name="launch", daemon=True)
    thread.start()
    # Shielded by hand: a cancelled start must still be waited for, or its machine is lost.
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if not done.done():
            await asyncio.wait([done])
        raise


def _launch(order: Launch) -> tuple[int, str]:
    STAGE.mkdir(mode=0o755, exist_ok=True)
    linux.leave_mount_namespace()
    linux.mount("cloche", str(STAGE), "tmpfs", options="mode=755,size=1m")
    lower = _mount_layers(order)
    device = _mount_disk(order)
    # redirect_dir: without it, a rename of a folder that came with the image is EXDEV.
    options = (
        f"lowerdir={lower},upperdir={STAGE}/disk/upper,workdir={STAGE}/disk/work,"
        "redirect_dir=on,volatile"
    )
    (STAGE / "rootfs").mkdir()
    linux.mount("overlay", rootfs(), "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
    return _run(order), device


def _mount_layers(order: Launch) -> str:
    targets = []
    namespace = open_user_namespace(order.first_id, IDS)
    try:
        (STAGE / "user").touch()
        linux.mount(f"/proc/self/fd/{namespace}", user_namespace(), "none", linux.MS_BIND)
        for number, layer in enumerate(order.layers):
            target = STAGE / f"layer-{number}"
            target.mkdir()
            linux.mount_idmapped(str(layer), str(target), namespace)
            targets.append(str(target))
    finally:
        os.close(namespace)
    return ":".join(targets)


def _mount_disk(order: Launch) -> str:
    target = STAGE / "disk"
    target.mkdir()
    backing = os.open(order.disk, os.O_RDWR | os.O_CLOEXEC)
    try:
        device, path = linux.attach_loop(backing)
    finally:
        os.close(backing)
    try:
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOATIME
        # noinit_itable: what is not there of a sparse file is zero, and need not be made so.
        # nobarrier: the disk ends with its machine, and nothing of it need reach the host's.
        linux.mount(path, str(target), "ext4", flags, "noinit_itable,nobarrier")
    finally:
        os.close(device)
    for name in ("upper", "work"):
        (target / name).mkdir(mode=0o755)
        os.chown(target / name, order.first_id, order.first_id)
    return path


def _run(order: Launch) -> int:
    """Run the OCI runtime from this thread, and so in this thread's mount namespace."""
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        order.command[0],
        list(order.command),
        {"PATH": os.defpath},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(order.log), log_flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            # Two steps, because either descriptor may be 3 or 4 already.
            (os.POSIX_SPAWN_DUP2, order.listener, 10),
            (os.POSIX_SPAWN_DUP2, order.lock, 11),
            (os.POSIX_SPAWN_DUP2, 10, _LISTEN_FD),
            (os.POSIX_SPAWN_DUP2, 11, _LOCK_FD),
        ],
    )
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
