"""Climbs the isolation ladder: proves a rung by booting a machine on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cloche.core.errors import ClocheError
from cloche.core.image import Image
from cloche.core.machine import Backend
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one rung can do on this host, and how we know."""

    rung: Rung
    available: bool
    detail: str
    """The proof when it is available; else why it is not."""
    remedy: str = ""
    """What to do to get it. Empty when it is available."""
    start_ms: float | None = None
    """From nothing to the end of a first command."""


async def prove(backend: Backend, find_image: Callable[[], Image]) -> Probe:
    """Run one command on one machine, and tell how it went. Raises nothing of ours."""
    try:
        runtime = await backend.check()
        image = find_image()
        began = time.perf_counter()
        async with await Sandbox.start_on(backend, SandboxSpec(), image) as sandbox:
            await sandbox.exec(["true"], timeout_s=30)
            start_ms = (time.perf_counter() - began) * 1000
    except ClocheError as error:
        return Probe(rung=backend.rung, available=False, detail=error.message, remedy=error.remedy)
    return Probe(rung=backend.rung, available=True, detail=runtime, start_ms=round(start_ms, 1))
