"""The seam between "start it somewhere" and "use it".

A backend is one package that makes Machines. Everything a machine can do
beyond living and dying is done by the guest inside it, over `dial`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cloche.core.image import Image
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec

ByteStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a machine has used so far, as the host counts it."""

    memory_bytes: int
    memory_peak_bytes: int
    cpu_s: float
    processes: int
    oom_kills: int
    """Processes the kernel ended because the machine's memory was full."""


class Machine(Protocol):
    """Something that runs the guest and can be dialled, paused, destroyed."""

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def rung(self) -> Rung: ...

    @property
    def paused(self) -> bool: ...

    async def dial(self) -> ByteStream:
        """Open one byte stream to the guest.

        Raises:
            SandboxLost: nobody is there any more.
        """
        ...

    async def alive(self) -> bool: ...

    async def pause(self) -> None:
        """Stop every process where it stands. Idempotent.

        Raises:
            SandboxLost: the machine is gone.
        """
        ...

    async def resume(self) -> None:
        """Undo `pause`. Idempotent.

        Raises:
            SandboxLost: the machine is gone.
        """
        ...

    async def usage(self) -> Usage:
        """Count what the machine has used.

        Raises:
            SandboxLost: the machine is gone.
        """
        ...

    async def endure(self) -> None:
        """Make the machine durable: it outlives this process until it is adopted or swept by name.

        Raises:
            SandboxLost: the machine is gone.
        """
        ...

    async def last_words(self) -> str:
        """Return the end of what the machine said while it started, for a post-mortem."""
        ...

    async def destroy(self) -> None:
        """End the machine and return once nothing of it is left. Idempotent.

        Raises:
            MachineNotDestroyed: a process, cgroup, device or folder outlived it.
        """
        ...


class Backend(Protocol):
    """Makes Machines of one rung."""

    @property
    def rung(self) -> Rung: ...

    async def check(self) -> str:
        """Return the program that does the work, with its version.

        A cheap look at what every machine needs; the proof is to boot one.

        Raises:
            BackendUnavailable: this host lacks something, and how to get it.
        """
        ...

    async def create(self, spec: SandboxSpec, image: Image, *, durable: bool = False) -> Machine:
        """Start a machine whose guest can be dialled at once.

        A durable machine outlives this process until it is adopted or swept by
        name; any other is an orphan, and swept, once its owner is dead.

        Raises:
            BackendUnavailable: this host lacks something every machine needs.
            MachineNotStarted: this one did not come up; nothing is left of it.
        """
        ...

    async def adopt(self, machine_id: str) -> Machine:
        """Take over a living machine that another process started.

        Raises:
            NoSuchMachine: it is dead or was never here; what was left of it is gone.
        """
        ...

    async def sweep(self, *, keep: Sequence[str] | None = None) -> list[str]:
        """Destroy what dead processes left behind, and return the ids.

        Durable machines are spared unless `keep` is given: then each one that it
        does not name goes as well.
        """
        ...

    def layers(self) -> set[Path]:
        """Return every image folder that a machine here stands on."""
        ...
