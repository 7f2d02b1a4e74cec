"""A command in a machine, while it runs and after."""

from __future__ import annotations

import binascii
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from signal import Signals
from typing import Literal

from cloche.core.errors import BadRequest
from cloche.core.process import Chunk, Exit, ProcessStatus
from cloche.sandbox import wire
from cloche.sandbox.client import Client

Collected = dict[Literal["stdout", "stderr"], int]


class Process:
    """A handle on one process. Dropping it neither stops nor forgets the process."""

    def __init__(self, client: Client, process_id: str, pid: int) -> None:
        self.id = process_id
        self.pid = pid
        """Its number inside the machine."""
        self._client = client
        self._exit: Exit | None = None

    @property
    def exit(self) -> Exit | None:
        """How it ended, once `output` or `wait` has seen it end."""
        return self._exit

    async def output(
        self, *, stdout_from: int = 0, stderr_from: int = 0
    ) -> AsyncGenerator[Chunk, None]:
        """Yield what it has written from these offsets on, and what it writes, until it ends.

        Leaving the loop early leaves the connection open until the generator is closed:
        wrap it in `contextlib.aclosing`, or drop it.

        A process that nobody follows keeps its last 64 MiB of each stream; one that
        is followed waits for its follower.

        Raises:
            SandboxLost: the machine is gone.
            GuestMisbehaved: the guest lied or fell silent.
            NoSuchProcess: the machine has forgotten it.
            BadRequest: an offset is beyond what was written.
        """
        if stdout_from < 0 or stderr_from < 0:
            raise BadRequest("An offset is below zero.", remedy="Offsets count from byte 0.")
        lines = self._client.lines(
            wire.OutputLine,
            "GET",
            f"/processes/{self.id}/output",
            {"stdout": stdout_from, "stderr": stderr_from},
        )
        follower = Follower({"stdout": stdout_from, "stderr": stderr_from})
        async with aclosing(lines):
            async for line in lines:
                if chunk := follower.take(line):
                    yield chunk
        self._exit = follower.ended()

    async def wait(self) -> Exit:
        """Wait until it ends; what it writes meanwhile is passed over.

        Raises:
            SandboxLost, GuestMisbehaved, NoSuchProcess: as `output`.
        """
        if self._exit is None:
            status = await self.status()
            self._exit = status.exit
            async for _ in self.output(
                stdout_from=status.stdout_bytes, stderr_from=status.stderr_bytes
            ):
                pass
        if self._exit is None:
            raise wire.misbehaved("a process without an end")
        return self._exit

    async def status(self) -> ProcessStatus:
        line = await self._client.call(wire.StatusLine, "GET", f"/processes/{self.id}")
        if line.id != self.id:
            raise wire.misbehaved("another process than the one asked for")
        return line.value()

    async def write(self, data: bytes | AsyncIterable[bytes], *, close: bool = False) -> None:
        """Send `data` to its input, at the pace it reads, and close the input if asked.

        Raises:
            InputClosed: it no longer reads, or was started without stdin.
        """
        await self._client.call(
            wire.Done,
            "POST",
            f"/processes/{self.id}/stdin",
            {"close": close},
            data,
            timeout_s=None,
        )

    async def signal(self, number: Signals | int) -> None:
        """Signal its process group."""
        if not 1 <= number <= 64:
            raise BadRequest(f"There is no signal {number}.", remedy="Signals go from 1 to 64.")
        await self._client.call(
            wire.Done, "POST", f"/processes/{self.id}/signal", {"number": int(number)}
        )

    async def kill(self) -> None:
        """Kill it and everything it started; return when the kernel says that all is dead."""
        await self._client.call(wire.StatusLine, "POST", f"/processes/{self.id}/kill")

    async def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal the new size."""
        await self._client.call(
            wire.Done, "POST", f"/processes/{self.id}/resize", {"rows": rows, "cols": cols}
        )


class Follower:
    """Checks that a followed process's lines are whole: no gap, no repeat, one end."""

    def __init__(self, offsets: Collected) -> None:
        self._offsets = offsets
        self._exit: Exit | None = None

    def take(self, line: wire.OutputLine) -> Chunk | None:
        if self._exit is not None:
            raise wire.misbehaved("output after the end")
        if line.started is not None:
            raise wire.misbehaved("a second start")
        if line.exit is not None:
            self._exit = line.exit.value()
        if line.stream is None:
            return None
        expected = self._offsets[line.stream] + line.lost
        if line.offset != expected:
            raise wire.misbehaved(f"{line.stream} at {line.offset}, expected {expected}")
        try:
            data = binascii.a2b_base64(line.data, strict_mode=True)
        except ValueError as error:  # binascii.Error is one; text beyond ASCII is a plain one.
            raise wire.misbehaved(str(error)) from None
        self._offsets[line.stream] = expected + len(data)
        return Chunk(stream=line.stream, offset=expected, data=data, lost=line.lost)

    def ended(self) -> Exit:
        if self._exit is None:
            raise wire.misbehaved("an answer that ends before its process")
        return self._exit
