"""One living container, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cloche.backends.container.cgroups import Cgroups
from cloche.backends.container.patience import until
from cloche.backends.container.record import Folder, Record, channel_path, start_time
from cloche.core.errors import MachineNotDestroyed, SandboxLost
from cloche.core.machine import ByteStream, Usage
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec

_DEATH_S = 10.0
_START_S = 30.0
_LAST_WORDS_BYTES = 4096


class Machine:
    """A machine whose processes, cgroups, loop device and folder are ours to end."""

    rung = Rung.CONTAINER

    def __init__(self, folder: Folder, record: Record) -> None:
        self.id = record.id
        self.spec: SandboxSpec = record.spec
        self.record = record
        self.paused = False
        self._folder = folder
        self._cgroups = Cgroups(record.id)
        self._descriptor: int | None = folder.open()
        self._destroying = asyncio.Lock()

    async def dial(self) -> ByteStream:
        if self._descriptor is None:
            raise self._lost()
        try:
            return await asyncio.open_unix_connection(channel_path(self._descriptor))
        except OSError:
            raise self._lost() from None

    async def alive(self) -> bool:
        return self._descriptor is not None and _is_running(self.record)

    async def endure(self) -> None:
        if self._descriptor is None:
            raise self._lost()
        self.record = replace(self.record, durable=True)
        self._folder.save(self.record)

    async def last_words(self) -> str:
        try:
            with self._folder.log.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_WORDS_BYTES))
                return log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    async def pause(self) -> None:
        await self._freeze(True)

    async def resume(self) -> None:
        await self._freeze(False)

    async def _freeze(self, frozen: bool) -> None:
        try:
            await self._cgroups.freeze(frozen)
        except OSError:
            raise self._lost() from None
        self.paused = frozen

    async def usage(self) -> Usage:
        try:
            return self._cgroups.usage()
        except OSError:
            raise self._lost() from None

    async def destroy(self) -> None:
        async with self._destroying:
            if self._descriptor is not None:
                await raze(self._folder, self.record)
                self.let_go()

    def let_go(self) -> None:
        """Forget the machine without touching it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def note_frozen(self) -> None:
        """Learn, after an adoption, whether the machine was left paused."""
        self.paused = self._cgroups.frozen()

    def _lost(self) -> SandboxLost:
        return SandboxLost(
            f"Machine {self.id} is gone.", remedy="Make a new sandbox and run it again."
        )


async def raze(folder: Folder, record: Record) -> None:
    """Take down whatever there is of a machine, in any state, and prove that it is gone.

    The folder goes last: as long as something is left, so is what names it.

    Raises:
        MachineNotDestroyed: what is left, by name.
    """
    cgroups = Cgroups(record.id)
    await _prove("its start to end", record, _not_starting(folder), _START_S)
    await _kill_first(record, cgroups)
    await _prove("its processes to die", record, lambda: _killed(cgroups), _DEATH_S)
    try:
        await cgroups.remove(_DEATH_S)
    except TimeoutError:
        raise _not_destroyed(record, "its cgroups to go") from None
    await _prove("its disk to be let go", record, lambda: _released(folder, record), _DEATH_S)
    await asyncio.to_thread(_remove, folder.path)


def _remove(folder: Path) -> None:
    while folder.exists():
        with contextlib.suppress(FileNotFoundError):  # Someone else is removing it, too.
            shutil.rmtree(folder)


async def _kill_first(record: Record, cgroups: Cgroups) -> None:
    """Kill process 1: the kernel ends every other process of the machine before it reaps it."""
    if cgroups.exist():
        await _thaw(cgroups)
    if not _is_running(record):
        return
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if _is_running(record):  # Asked again: now the descriptor holds the very process.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await _until_dead(pidfd)
    finally:
        os.close(pidfd)


async def _thaw(cgroups: Cgroups) -> None:
    # A frozen process on cgroup v1 does not even die.
    try:
        await cgroups.freeze(False)
    except (FileNotFoundError, TimeoutError):
        return


async def _until_dead(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    dead = asyncio.Event()
    loop.add_reader(pidfd, dead.set)
    try:
        await asyncio.wait_for(dead.wait(), _DEATH_S)
    except TimeoutError:
        return  # What is left is named by the checks that follow.
    finally:
        loop.remove_reader(pidfd)


def _killed(cgroups: Cgroups) -> bool:
    """Kill what a cut-short start may have left; return whether nothing is."""
    pids = cgroups.pids()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return not pids


def _not_starting(folder: Folder) -> Callable[[], bool]:
    return lambda: not folder.is_starting()


def _released(folder: Folder, record: Record) -> bool:
    """Return whether the kernel has let go of the loop device."""
    # A start that was cut short did not come to write the device down: look at all of them.
    name = Path(record.loop_device).name or "loop*"
    disk = os.path.realpath(folder.disk)  # As the kernel spells it.
    for backing in Path("/sys/block").glob(f"{name}/loop/backing_file"):
        with contextlib.suppress(OSError):  # No file is bound to it any more.
            if backing.read_text().startswith(disk):
                return False
    return True


def _is_running(record: Record) -> bool:
    return record.pid > 0 and start_time(record.pid) == record.pid_started


async def _prove(
    what: str, record: Record, condition: Callable[[], bool], timeout_s: float
) -> None:
    try:
        await until(condition, timeout_s)
    except TimeoutError:
        raise _not_destroyed(record, what) from None


def _not_destroyed(record: Record, what: str) -> MachineNotDestroyed:
    return MachineNotDestroyed(
        f"Machine {record.id} is not gone: waited in vain for {what}.",
        remedy="It is swept at the next start; `cloche doctor` shows what is left.",
    )
