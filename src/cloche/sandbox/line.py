"""One connection of a machine to the world, counted and cut when it must end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from cloche.core.machine import ByteStream
from cloche.core.network import Attempt, Verdict
from cloche.sandbox.dialling import BUFFER_BYTES, Refused

Via = Literal["http", "connect", "socks5"]


class Line:
    """A connection that a program asked for: where to, what went over it, how it ended."""

    def __init__(self, name: str, port: int, via: Via, spend: Callable[[int], None]) -> None:
        self.name = name
        self.port = port
        self.via = via
        self.address = ""
        self.verdict = Verdict(allowed=False)
        self.used_at = time.monotonic()
        self.half_closed = False
        self.cut_because = ""
        self._spend = spend
        self._at = datetime.now(UTC)
        self._began = self.used_at
        self._up = self._down = 0
        self._stream: ByteStream | None = None
        self._task = asyncio.current_task()

    def joined(self, stream: ByteStream, address: str) -> None:
        self._stream, self.address = stream, address
        stream[1].transport.set_write_buffer_limits(high=BUFFER_BYTES)

    async def send(self, data: bytes) -> None:
        """Pass bytes on to the world. Raises `Refused` once the machine has had its share."""
        if self._stream is None or not data:
            return
        self._spend(len(data))
        self._up += len(data)
        self.used_at = time.monotonic()
        self._stream[1].write(data)
        await self._stream[1].drain()
        self.used_at = time.monotonic()

    async def read(self) -> bytes:
        """Return what the world says next; nothing at its end. Raises as `send`."""
        if self._stream is None:
            return b""
        try:
            data = await self._stream[0].read(BUFFER_BYTES)
        except ConnectionError:
            raise Refused("broken", f"{self.name} broke the connection off") from None
        self._spend(len(data))
        self._down += len(data)
        self.used_at = time.monotonic()
        return data

    def end(self) -> None:
        """Say that no more will be sent."""
        self.half_closed = True
        if self._stream is not None and self._stream[1].can_write_eof():
            self._stream[1].write_eof()

    async def relay(self, client: ByteStream, early: bytes = b"") -> None:
        """Pass bytes both ways until both sides have ended, or either breaks."""
        up = asyncio.ensure_future(self._pass_up(client[0], early))
        down = asyncio.ensure_future(self._pass_down(client[1]))
        try:
            await asyncio.gather(up, down)
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _pass_up(self, reader: asyncio.StreamReader, early: bytes) -> None:
        await self.send(early)
        while data := await reader.read(BUFFER_BYTES):
            await self.send(data)
        self.end()

    async def _pass_down(self, writer: asyncio.StreamWriter) -> None:
        while data := await self.read():
            writer.write(data)
            await writer.drain()
            self.used_at = time.monotonic()
        self.half_closed = True
        writer.write_eof()

    def cut(self, because: str) -> None:
        """End the connection from our side, at once."""
        if not self.cut_because and self._task is not None:
            self.cut_because = because
            self._task.cancel()

    def close(self) -> None:
        if self._stream is not None:
            transport = self._stream[1].transport
            # What the other side does not take in would be kept for it for ever.
            if self.cut_because or transport.get_write_buffer_size():
                transport.abort()
            else:
                transport.close()

    def attempt(self, error: BaseException | None) -> Attempt:
        """Tell how it went, for the record."""
        verdict: Literal["allowed", "refused", "failed", "cut"] = "allowed"
        reason = ""
        if isinstance(error, Refused):
            verdict = "refused" if error.by_us and not self.address else "failed"
            verdict = "cut" if error.fault == "limit" and self.address else verdict
            reason = error.message
        elif isinstance(error, asyncio.CancelledError):
            verdict, reason = "cut", self.cut_because or "the network was taken away"
        elif error is not None and not self.address:
            verdict, reason = "failed", type(error).__name__
        return Attempt(
            at=self._at,
            name=self.name,
            port=self.port,
            via=self.via,
            verdict=verdict,
            rule=self.verdict.rule,
            reason=reason,
            address=self.address,
            bytes_up=self._up,
            bytes_down=self._down,
            duration_s=round(time.monotonic() - self._began, 3),
        )
