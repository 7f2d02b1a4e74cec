"""Waits for the kernel, which lets go of things a moment after it is told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_FIRST_S = 0.0005
_LONGEST_S = 0.05


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Ask again and again, ever less often.

    Raises:
        TimeoutError: it did not come true.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_S)
