"""Where machines come from, as those who run things on them see it."""

from __future__ import annotations

from typing import Protocol

from cloche.core.errors import BackendUnavailable, SandboxElsewhere
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox


class Machines(Protocol):
    """Gives out machines that outlive this process."""

    async def claim(self, spec: SandboxSpec, min_rung: Rung | None) -> Sandbox:
        """Return a fresh machine.

        Raises:
            RungUnavailable, ImageMissing, BackendUnavailable, MachineNotStarted:
                there is none to be had.
        """
        ...

    async def adopt(self, machine_id: str) -> Sandbox:
        """Take over a machine that was given out before, by this process or another.

        Raises:
            NoSuchMachine: it is gone.
        """
        ...


class NoMachines:
    """Those of a server that leaves all work to workers."""

    async def claim(self, spec: SandboxSpec, min_rung: Rung | None) -> Sandbox:
        raise BackendUnavailable(
            "This server has no machines of its own: workers run its jobs.",
            remedy="Submit a job, with keep_alive_s if its machine is to stand on, "
            "or ask a server that has machines.",
        )

    async def adopt(self, machine_id: str) -> Sandbox:
        raise SandboxElsewhere(
            f"The machine {machine_id} is on a worker's host, and cannot be reached from here.",
            remedy="Send the request to a server that runs there.",
        )
