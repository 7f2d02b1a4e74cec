"""Makes, finds again and sweeps container machines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cloche.backends.container import bundle, cgroups, ownership, record
from cloche.backends.container.disk import Disks
from cloche.backends.container.launch import Launch, launch, rootfs, user_namespace
from cloche.backends.container.machine import Machine, raze
from cloche.backends.container.record import Folder, Record
from cloche.core.errors import (
    BackendUnavailable,
    MachineNotDestroyed,
    MachineNotStarted,
    NoSuchMachine,
)
from cloche.core.image import Image
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec

logger = logging.getLogger(__name__)

_RUNTIMES = ("runc", "crun")
_DRAFT_S = 60.0
"""A folder that is not a machine's after this long never will be."""


class Backend:
    """Containers under the first OCI runtime that works on this host."""

    rung = Rung.CONTAINER

    def __init__(self, data: Path, *, runtimes: Sequence[str] = _RUNTIMES) -> None:
        self._machines = data / "machines"
        self._owners = data / "owners"
        self._owner: ownership.Owner | None = None
        self._runtimes = list(runtimes)
        self._disks = Disks()

    async def check(self) -> str:
        _require_root()
        runtime = self._find_runtimes()[0]
        process = await asyncio.create_subprocess_exec(
            runtime, "--version", stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        version = said.decode(errors="replace").partition("\n")[0]
        return f"{version}, cgroup {cgroups.version()}"

    async def create(self, spec: SandboxSpec, image: Image, *, durable: bool = False) -> Machine:
        _require_root()
        failures = []
        for runtime in self._find_runtimes():
            try:
                machine = await self._create(spec, image, runtime, durable=durable)
            except MachineNotStarted as error:
                failures.append(error)
            else:
                self._runtimes = [runtime]
                return machine
        # All of them: the last one's may be that it does not work on this host at all.
        reasons = " ".join(dict.fromkeys(failure.message for failure in failures))
        raise MachineNotStarted(reasons, remedy=failures[0].remedy)

    async def adopt(self, machine_id: str) -> Machine:
        folder = Folder(self._machines / machine_id)
        found = folder.load() if record.is_id(machine_id) else None
        if found is None:
            raise _no_such_machine(machine_id)
        mine = replace(found, owner=self._own())
        machine = Machine(folder, mine)
        if not await machine.alive():
            await machine.destroy()
            raise _no_such_machine(machine_id)
        folder.save(mine)
        machine.note_frozen()
        return machine

    async def sweep(self, *, keep: Sequence[str] | None = None) -> list[str]:
        _require_root()
        swept: list[str] = []
        with ownership.turn(self._machines / ".sweep") as is_mine:
            if not is_mine:  # Another process is at it.
                return swept
            for path in record.folders(self._machines):
                try:
                    if await self._sweep_one(Folder(path), keep):
                        swept.append(path.name)
                except MachineNotDestroyed as error:
                    logger.warning("%s It is tried again at the next sweep.", error)
            self._sweep_drafts()
        return swept

    async def _sweep_one(self, folder: Folder, keep: Sequence[str] | None) -> bool:
        found = folder.load()
        if found is None:  # Half removed, or damaged: the id still finds all there is.
            found = Record(id=folder.path.name, spec=SandboxSpec(), owner="", durable=False)
        elif ownership.is_alive(self._owners, found.owner) or _is_spared(found, keep):
            return False
        await raze(folder, found)
        return True

    def layers(self) -> set[Path]:
        records = (Folder(path).load() for path in record.folders(self._machines))
        return {Path(layer) for found in records if found for layer in found.layers}

    def close(self) -> None:
        """Give up every machine that is still ours; anyone may sweep them now."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    async def _create(
        self, spec: SandboxSpec, image: Image, runtime: str, *, durable: bool
    ) -> Machine:
        folder, entry = self._claim(spec, image, durable=durable)
        try:
            entry = await self._start(folder, entry, image, runtime)
            return Machine(folder, entry)
        except BaseException as error:
            said = _tail(folder.log)
            await asyncio.shield(raze(folder, entry))
            if isinstance(error, OSError):
                raise _not_started(f"{error.strerror} ({error.filename})") from error
            if isinstance(error, _RuntimeFailed):
                raise _not_started(f"{Path(runtime).name} said: {said}") from None
            raise

    def _claim(self, spec: SandboxSpec, image: Image, *, durable: bool) -> tuple[Folder, Record]:
        """Take an id, and with it a range of user ids, that no other machine here has."""
        while True:
            entry = Record(
                id=record.new_id(self._machines),
                spec=spec,
                owner=self._own(),
                durable=durable,
                layers=tuple(map(str, image.layers)),
            )
            folder = Folder.make(self._machines, entry)
            if not record.is_contested(self._machines, entry.id):
                return folder, entry
            folder.remove()

    async def _start(self, folder: Folder, entry: Record, image: Image, runtime: str) -> Record:
        await asyncio.to_thread(self._disks.make, folder.disk, entry.spec.disk_mib)
        first_id = record.first_id(entry.id)
        config = bundle.config(
            entry.spec,
            machine_id=entry.id,
            rootfs=rootfs(),
            user_namespace=user_namespace(),
            first_id=first_id,
            memory_swap=cgroups.counts_swap(),
        )
        (folder.bundle / "config.json").write_text(json.dumps(config))
        pid_file = folder.path / "pid"
        lock = folder.lock()
        try:
            with folder.listen() as listener:
                code, loop_device = await launch(
                    Launch(
                        command=[
                            runtime, "--root", str(folder.runtime_state), "run", "--detach",
                            "--bundle", str(folder.bundle), "--pid-file", str(pid_file),
                            "--preserve-fds", "1", entry.id,
                        ],
                        layers=image.layers,
                        disk=folder.disk,
                        first_id=first_id,
                        listener=listener.fileno(),
                        lock=lock,
                        log=folder.log,
                    )
                )  # fmt: skip
        finally:
            os.close(lock)
        if code:
            raise _RuntimeFailed
        cgroups.Cgroups(entry.id).bound_sockets((entry.spec.memory_mib << 20) // 4)
        entry = record.started(entry, int(pid_file.read_text()), loop_device, runtime)
        folder.save(entry)
        return entry

    def _own(self) -> str:
        if self._owner is None:
            self._owner = ownership.Owner(self._owners)
        return self._owner.name

    def _find_runtimes(self) -> list[str]:
        search = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
        found = [path for name in self._runtimes if (path := shutil.which(name, path=search))]
        if not found:
            raise BackendUnavailable(
                f"No OCI runtime is installed: looked for {' and '.join(self._runtimes)}.",
                remedy="Run `make setup`, or install the package runc (or crun).",
            )
        return found

    def _sweep_drafts(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for draft in self._machines.glob(".new-*"):
                if time.time() - draft.stat().st_mtime > _DRAFT_S:
                    shutil.rmtree(draft)


class _RuntimeFailed(Exception):
    """The OCI runtime ended with an error, which is in the machine's log."""


def _require_root() -> None:
    if os.geteuid() != 0:
        raise BackendUnavailable(
            "The container backend needs root: it mounts file systems, maps user ids and "
            "sets cgroup limits.",
            remedy="Run it with sudo, or as root. Code inside a machine never has root's rights.",
        )


def _is_spared(found: Record, keep: Sequence[str] | None) -> bool:
    return found.durable and (keep is None or found.id in keep)


def _tail(log: Path) -> str:
    try:
        return log.read_text(errors="replace")[-2000:].strip()
    except FileNotFoundError:
        return ""


def _not_started(reason: str) -> MachineNotStarted:
    return MachineNotStarted(
        f"The machine did not start: {reason}",
        remedy="Run `cloche doctor` to see what this host lacks.",
    )


def _no_such_machine(machine_id: str) -> NoSuchMachine:
    return NoSuchMachine(
        f"No machine {machine_id!r} is alive here.",
        remedy="Make a new sandbox: a machine does not outlive its host's restart.",
    )
