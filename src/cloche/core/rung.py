"""The isolation ladder: what stands between the code and the host."""

from __future__ import annotations

import enum


class Rung(enum.StrEnum):
    """How a machine is walled off, listed strongest first."""

    FIRECRACKER = "firecracker"
    QEMU = "qemu"
    GVISOR = "gvisor"
    CONTAINER = "container"
    DOCKER = "docker"

    def at_least(self, minimum: Rung) -> bool:
        """Return whether this rung is as strong as `minimum`, or stronger."""
        ladder = list(Rung)
        return ladder.index(self) <= ladder.index(minimum)
