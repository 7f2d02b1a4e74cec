"""Machines booted ahead, so that a job does not wait for one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Final

from cloche.core.errors import BadSettings, ClocheError, MachineNotDestroyed
from cloche.core.image import Image
from cloche.core.machine import Backend
from cloche.core.meters import UNMETERED, Meters
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)

_WARM_UP_S: Final = 30.0
_SETTLE_S: Final = 0.05
"""Refilling waits this long, so that whoever took a machine has the processors first."""
_BACKOFF_S: Final = (0.5, 1, 2, 5, 10, 30)
"""How long to wait after the first, second, … failure to start a machine in a row."""


class Pool:
    """`size` machines of one spec, refilled in the background.

    A machine leaves the pool once and never comes back: no two jobs share one.
    """

    def __init__(
        self,
        backend: Backend,
        spec: SandboxSpec,
        image: Image,
        *,
        size: int,
        meters: Meters = UNMETERED,
    ) -> None:
        if size < 0:
            raise BadSettings(
                f"The warm pool's size is {size}.", remedy="Set it to 0 (no pool) or more."
            )
        self.spec = spec
        self._backend = backend
        self._image = image
        self._size = size
        self._meters = meters
        self._warm: deque[Sandbox] = deque()
        self._wanted = asyncio.Event()
        self._changed = asyncio.Condition()
        self._filler: asyncio.Task[None] | None = None

    @property
    def ready(self) -> int:
        return len(self._warm)

    def start(self) -> None:
        """Begin to fill the pool."""
        if self._filler is None and self._size:
            self._filler = asyncio.create_task(self._fill(), name="pool")

    async def filled(self) -> None:
        """Wait until every machine of the pool is up."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._warm) >= self._size)

    async def claim(self) -> Sandbox:
        """Take a warm machine, or start one when none is left. It is the caller's to close.

        Raises:
            BackendUnavailable, MachineNotStarted: as `Backend.create`.
        """
        began = time.monotonic()
        while self._warm:
            sandbox = self._warm.popleft()
            try:
                alive = await sandbox.machine.alive()
            except BaseException:  # The caller left: the next one may have it.
                self._warm.appendleft(sandbox)
                raise
            self._wanted.set()
            if alive:
                self._meters.machine_ready("warm", time.monotonic() - began)
                return sandbox
            logger.warning("machine %s died in the pool", sandbox.id)
            try:
                await sandbox.close()
            except MachineNotDestroyed as error:
                logger.warning("%s", error)
        sandbox = await Sandbox.start_on(self._backend, self.spec, self._image)
        self._meters.machine_ready("cold", time.monotonic() - began)
        return sandbox

    async def close(self) -> None:
        """Stop filling and destroy what nobody claimed."""
        if self._filler is not None:
            self._filler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filler
            self._filler = None
        unclaimed = [self._warm.popleft() for _ in range(len(self._warm))]
        closing = (sandbox.close() for sandbox in unclaimed)
        results = await asyncio.gather(*closing, return_exceptions=True)
        for error in filter(None, results):
            raise error

    async def _fill(self) -> None:
        failures = 0
        while True:
            self._wanted.clear()
            if len(self._warm) >= self._size:
                await self._wanted.wait()
                await asyncio.sleep(_SETTLE_S)
                continue
            try:
                sandbox = await self._warm_up()
            except ClocheError as error:
                delay_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                failures += 1
                self._meters.pool_failed()
                logger.warning("pool: %s Trying again in %s s.", error, delay_s)
                await asyncio.sleep(delay_s)
            else:
                failures = 0
                self._warm.append(sandbox)
                async with self._changed:
                    self._changed.notify_all()

    async def _warm_up(self) -> Sandbox:
        """Start a machine and run one command on it: the first one takes twice as long."""
        began = time.monotonic()
        sandbox = await Sandbox.start_on(self._backend, self.spec, self._image)
        try:
            await sandbox.exec(["true"], timeout_s=_WARM_UP_S)
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        self._meters.machine_ready("ahead", time.monotonic() - began)
        return sandbox
