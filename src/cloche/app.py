"""The composition root: the only place that names concrete backends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cloche import settings as settings_module
from cloche.backends import container
from cloche.core.errors import ImageMissing, RungUnavailable
from cloche.core.image import Image
from cloche.core.meters import UNMETERED, Meters
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.sandbox import sandbox as sandbox_module
from cloche.sandbox.images import Images
from cloche.sandbox.ladder import Probe, prove
from cloche.sandbox.pool import Pool

_UNBUILT = {
    Rung.FIRECRACKER: "This version of Cloche has no Firecracker backend yet.",
    Rung.QEMU: "This version of Cloche has no QEMU backend yet.",
    Rung.GVISOR: "This version of Cloche has no gVisor backend yet.",
    Rung.DOCKER: "This version of Cloche has no Docker backend yet.",
}


@dataclass(frozen=True, slots=True)
class Host:
    """This host's backend and images, put together from the settings."""

    backend: container.Backend
    images: Images

    @classmethod
    def from_settings(cls, settings: settings_module.Settings | None = None) -> Host:
        chosen = settings or settings_module.load()
        backend = container.Backend(chosen.data)
        return cls(backend, Images(chosen.data, used_layers=backend.layers))

    def image(self, name: str) -> Image:
        """Find a built image.

        Raises:
            ImageMissing: there is none of that name, or it is not built yet.
            ImageCorrupt: it is damaged.
        """
        found = self.images.find()
        if name != found.name:
            raise ImageMissing(
                f"There is no image {name!r}.", remedy=f"Leave it out for {found.name!r}."
            )
        return found

    async def probe(self) -> list[Probe]:
        """Look at each rung of the ladder, strongest first."""
        proven = await prove(self.backend, self.images.find)
        return [
            proven
            if rung is self.backend.rung
            else Probe(
                rung=rung,
                available=False,
                detail=_UNBUILT[rung],
                remedy=f"Use the {self.backend.rung} rung.",
            )
            for rung in Rung
        ]


class Machines:
    """Gives workers machines of this host: warm ones of the usual size, others made to order."""

    def __init__(self, host: Host, pool: Pool, meters: Meters = UNMETERED) -> None:
        self._host = host
        self._pool = pool
        self._meters = meters

    async def claim(self, spec: SandboxSpec, min_rung: Rung | None) -> sandbox_module.Sandbox:
        rung = self._host.backend.rung
        if min_rung is not None and not rung.at_least(min_rung):
            raise RungUnavailable(
                f"The {min_rung} rung is demanded; this host gives {rung}.",
                remedy="Run it on a host that has it, or demand less.",
            )
        if spec == self._pool.spec:
            sandbox = await self._pool.claim()
            await sandbox.machine.endure()
            return sandbox
        began = time.monotonic()
        sandbox = await sandbox_module.Sandbox.start_on(
            self._host.backend, spec, self._host.image(spec.image), durable=True
        )
        self._meters.machine_ready("cold", time.monotonic() - began)
        return sandbox

    async def adopt(self, machine_id: str) -> sandbox_module.Sandbox:
        return sandbox_module.Sandbox(await self._host.backend.adopt(machine_id))


class Sandbox(sandbox_module.Sandbox):
    """A sandbox that finds a backend and an image by itself."""

    @classmethod
    def create(
        cls,
        *,
        image: str = "base",
        vcpus: int = 2,
        memory_mib: int = 2048,
        disk_mib: int = 8192,
        pids: int = 1024,
        settings: settings_module.Settings | None = None,
    ) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        """Make a machine for the length of an `async with` block.

        Raises:
            BadRequest: a limit is out of range.
            ImageMissing, ImageCorrupt: there is no image to start from.
            BackendUnavailable, MachineNotStarted: this host cannot start a machine.
        """
        spec = SandboxSpec(
            image=image, vcpus=vcpus, memory_mib=memory_mib, disk_mib=disk_mib, pids=pids
        )
        return cls.of(spec, settings)

    @classmethod
    @contextlib.asynccontextmanager
    async def of(
        cls, spec: SandboxSpec, settings: settings_module.Settings | None = None
    ) -> AsyncIterator[Sandbox]:
        """Make a machine of `spec`, as `create` does, after sweeping what the dead left."""
        host = Host.from_settings(settings)
        try:
            await host.backend.sweep()
            async with await cls.start_on(host.backend, spec, host.image(spec.image)) as sandbox:
                yield sandbox
        finally:
            host.backend.close()
