"""Follows a process in the background, so that a check can wait for a word of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from cloche.core.process import Exit
from cloche.sandbox.process import Process

POLL_S = 0.01


async def eventually(
    condition: Callable[[], Awaitable[object]], what: str, *, timeout_s: float
) -> None:
    """Ask again and again until the answer is yes; fail with `what` when it never is."""
    deadline = time.monotonic() + timeout_s
    while not (answer := await condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}; last: {answer!r}")
        await asyncio.sleep(POLL_S)


class Transcript:
    """All that a process says, from the moment of `async with`."""

    def __init__(self, process: Process, *, timeout_s: float = 30.0) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._process = process
        self._timeout_s = timeout_s
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following

    async def until(self, words: bytes) -> None:
        """Wait until stdout holds `words`."""

        async def said() -> bool:
            if words not in self.stdout and self._following is not None and self._following.done():
                self._following.result()
                raise AssertionError(f"it ended without {words!r}: {self.heard()}")
            return words in self.stdout

        try:
            await eventually(said, repr(words), timeout_s=self._timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; heard {self.heard()}") from None

    async def ended(self) -> Exit:
        """Wait until the process has ended."""
        if self._following is None:
            raise AssertionError("not begun: use `async with`")
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(self._following)
        except TimeoutError:
            raise AssertionError(f"it does not end; heard {self.heard()}") from None
        if self._process.exit is None:
            raise AssertionError(f"no end was told; heard {self.heard()}")
        return self._process.exit

    def heard(self) -> str:
        """Return the end of what was said, as evidence."""
        return f"stdout {bytes(self.stdout[-500:])!r}, stderr {bytes(self.stderr[-500:])!r}"

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._process.output()) as chunks:
            async for chunk in chunks:
                (self.stdout if chunk.stream == "stdout" else self.stderr).extend(chunk.data)
