"""What to build: the size and the walls of one machine."""

from __future__ import annotations

from dataclasses import dataclass

from cloche.core.errors import BadRequest

_BOUNDS = {
    "vcpus": (1, 256),
    "memory_mib": (64, 1 << 20),
    "disk_mib": (64, 4 << 20),
    "pids": (32, 32768),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What to build. Equal specs may be served from the same warm pool."""

    image: str = "base"
    vcpus: int = 2
    memory_mib: int = 2048
    disk_mib: int = 8192
    """What the machine may write in all. The space is taken as it is used."""
    pids: int = 1024
    """Processes and threads together, the guest's own few included."""

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise BadRequest(
                    f"{name} is {value!r}; a machine needs a whole number from {low} to {high}.",
                    remedy=f"Ask for {low} <= {name} <= {high}.",
                )
        if not self.image:
            raise BadRequest(
                f"image is {self.image!r}; a machine needs the name of one.",
                remedy="Leave it out for the standard image, `base`.",
            )
