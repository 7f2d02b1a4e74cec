"""The folder of one machine: all that is known of it, for whoever comes after us."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cloche.backends.container import ownership
from cloche.core.spec import SandboxSpec

_SLOT_DIGITS = 3
_FIRST_ID = 0x70000000
"""Above every range that distributions, systemd and subuid hand out, below the sign bit."""
_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What must outlive our process to find the machine again."""

    id: str
    spec: SandboxSpec
    owner: str
    durable: bool
    layers: tuple[str, ...] = ()
    runtime: str = ""
    pid: int = 0
    pid_started: int = 0
    """The kernel's start time of `pid`: together they name one process for good."""
    loop_device: str = ""


class Folder:
    """A machine's place on disk. Its existence is the machine's: made first, removed last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.disk = path / "disk.img"
        self.log = path / "log"
        self.bundle = path / "bundle"
        self.runtime_state = path / "oci"
        self._record = path / "machine.json"
        self._lock = path / "starting"

    @classmethod
    def make(cls, machines: Path, record: Record) -> Folder:
        """Create the folder with its record in it, in one step."""
        machines.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = cls(machines / f".new-{record.id}")
        draft.path.mkdir(mode=0o700)
        draft.bundle.mkdir()
        draft.save(record)
        draft._lock.touch(mode=0o600)
        draft.path.rename(machines / record.id)
        return cls(machines / record.id)

    def load(self) -> Record | None:
        """Return the record, or None when it cannot be read."""
        try:
            raw = json.loads(self._record.read_text())
            layers = tuple(map(str, raw["layers"]))
            return Record(**{**raw, "layers": layers, "spec": SandboxSpec(**raw["spec"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, record: Record) -> None:
        draft = self._record.with_suffix(".new")
        draft.write_text(json.dumps(asdict(record)))
        draft.rename(self._record)

    def lock(self) -> int:
        """Hold the start lock; a runtime that inherits the descriptor holds it too."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def is_starting(self) -> bool:
        return ownership.is_locked(self._lock)

    def open(self) -> int:
        return os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def listen(self) -> socket.socket:
        """Make the guest's channel, on our side of the wall: the guest is handed the socket
        alone, and so can put nothing else in its place."""
        folder = self.open()
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(channel_path(folder))
            listener.listen(256)
        finally:
            os.close(folder)
        return listener

    def remove(self) -> None:
        shutil.rmtree(self.path)


def channel_path(folder: int) -> str:
    """Name the channel by descriptor: a socket's address holds 107 bytes, a path may not fit."""
    return f"/proc/self/fd/{folder}/guest.sock"


def new_id(machines: Path) -> str:
    """Choose a machine id whose range of user ids no other machine here has.

    The range is part of the id, so the folder's name is the claim to it.
    """
    taken = {path.name[:_SLOT_DIGITS] for path in folders(machines)}
    while True:
        machine_id = secrets.token_hex(6)
        if machine_id[:_SLOT_DIGITS] not in taken:
            return machine_id


def is_contested(machines: Path, machine_id: str) -> bool:
    """Tell whether another process chose the same range at the same moment."""
    slot = machine_id[:_SLOT_DIGITS]
    return any(
        path.name[:_SLOT_DIGITS] == slot and path.name != machine_id for path in folders(machines)
    )


def first_id(machine_id: str) -> int:
    """Return the host's id of the machine's root."""
    return _FIRST_ID + (int(machine_id[:_SLOT_DIGITS], 16) << 16)


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def folders(machines: Path) -> list[Path]:
    if not machines.exists():
        return []
    return sorted(path for path in machines.iterdir() if is_id(path.name))


def started(record: Record, pid: int, loop_device: str, runtime: str) -> Record:
    return replace(
        record, pid=pid, pid_started=start_time(pid), loop_device=loop_device, runtime=runtime
    )


def start_time(pid: int) -> int:
    """Return the kernel's start time of a process, in ticks since boot; 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])
