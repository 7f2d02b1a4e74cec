"""A machine whose guest was taken over, and every call that the host may make to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cloche.core.errors import ClocheError
from cloche.core.machine import ByteStream, Usage
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

PROCESS_ID = "0123456789abcdef"
ENOUGH = 4 << 20
"""What a caller reads of a stream that is endless by nature before it has had enough."""


class HostileMachine:
    """Lives and can be dialled; whoever answers misbehaves in one given way."""

    id = "00000000bad0"
    rung = Rung.CONTAINER
    paused = False

    def __init__(self, folder: Path, behaviour: Behaviour) -> None:
        self.spec = SandboxSpec()
        self.sent = 0
        """Bytes that the host took before it had enough."""
        self._path = str(folder / "guest.sock")
        self._behaviour = behaviour
        self._answering: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._answer, self._path)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        for writer in self._writers:
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
        await asyncio.sleep(0)  # A transport is closed in the loop's next turn.
        Path(self._path).unlink(missing_ok=True)

    async def dial(self) -> ByteStream:
        return await asyncio.open_unix_connection(self._path)

    async def alive(self) -> bool:
        return True

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def usage(self) -> Usage:
        return Usage(memory_bytes=0, memory_peak_bytes=0, cpu_s=0, processes=0, oom_kills=0)

    async def last_words(self) -> str:
        return ""

    async def destroy(self) -> None:
        return

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        self._writers.append(writer)
        task.add_done_callback(self._answering.discard)
        write = writer.write

        def counted(data: bytes) -> None:
            self.sent += len(data)
            write(data)

        writer.write = counted  # type: ignore[assignment,method-assign]
        try:
            await self._behaviour(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            writer.close()


def says(answer: bytes, *, then: Behaviour | None = None) -> Behaviour:
    """Hear a request's head, answer with these bytes, and then close, or go on as told."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if then is not None:
            await then(reader, writer)

    return behave


async def hold(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Keep the connection open and say nothing, until the host has had enough."""
    while await reader.read(65536):
        pass


def repeat(data: bytes) -> Behaviour:
    """Send the same for ever, as fast as the host takes it."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(data)
            await writer.drain()

    return behave


def drip(data: bytes, *, every_s: float = 0.05) -> Behaviour:
    """Send one byte at a time, and begin again at the end."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            for byte in data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(every_s)

    return behave


def reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    fields = "".join(f"{header}\r\n" for header in headers)
    return f"HTTP/1.1 {status}\r\n{fields}content-length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def _take(stream: Any) -> int:
    """Read a stream that may be endless by nature, up to a bound of the caller's own."""
    taken = 0
    async with contextlib.aclosing(stream):
        async for piece in stream:
            taken += (
                len(piece) if isinstance(piece, bytes) else len(getattr(piece, "data", b"")) + 1
            )
            if taken > ENOUGH:
                break
    return taken


async def _pieces() -> AsyncIterator[bytes]:
    for _ in range(64):
        yield bytes(65536)


async def _tunnel(sandbox: Sandbox, **where: Any) -> bytes:
    """Open a tunnel, and listen a moment: one that is open may be silent for ever."""
    reader, writer = await sandbox.tunnel(**where)
    try:
        async with asyncio.timeout(0.1):
            return await reader.read(1000)
    except TimeoutError:
        return b""
    finally:
        writer.close()


CALLS: dict[str, Callable[[Sandbox, Process], Awaitable[object]]] = {
    "hello": lambda s, _: s.hello(),
    "exec": lambda s, _: s.exec(["true"], timeout_s=0.5, max_output_bytes=1 << 20),
    "exec with stdin": lambda s, _: s.exec(["cat"], timeout_s=0.5, stdin=bytes(1 << 20)),
    "run_code": lambda s, _: s.run_code("python", "1", timeout_s=0.5),
    "start": lambda s, _: s.start(["true"]),
    "start_code": lambda s, _: s.start_code("bash", "true"),
    "attach": lambda s, _: s.attach(PROCESS_ID),
    "processes": lambda s, _: s.processes(),
    "tunnel to a port": lambda s, _: _tunnel(s, port=80),
    "tunnel to a socket": lambda s, _: _tunnel(s, unix="/workspace/x"),
    "output": lambda _, p: _take(p.output()),
    "output from": lambda _, p: _take(p.output(stdout_from=7, stderr_from=9)),
    "wait": lambda _, p: p.wait(),
    "status": lambda _, p: p.status(),
    "stdin": lambda _, p: p.write(bytes(1 << 20)),
    "stdin in pieces": lambda _, p: p.write(_pieces(), close=True),
    "signal": lambda _, p: p.signal(15),
    "kill": lambda _, p: p.kill(),
    "resize": lambda _, p: p.resize(24, 80),
    "read": lambda s, _: s.files.read("x", max_bytes=1 << 20),
    "read a range": lambda s, _: s.files.read("x", offset=3, limit=5),
    "read_text": lambda s, _: s.files.read_text("x", max_bytes=1 << 20),
    "stream": lambda s, _: _take(s.files.stream("x")),
    "write": lambda s, _: s.files.write("x", bytes(1 << 20)),
    "write text": lambda s, _: s.files.write("x", "text"),
    "write in pieces": lambda s, _: s.files.write("x", _pieces()),
    "stat": lambda s, _: s.files.stat("x"),
    "exists": lambda s, _: s.files.exists("x"),
    "list": lambda s, _: s.files.list(),
    "mkdir": lambda s, _: s.files.mkdir("x"),
    "move": lambda s, _: s.files.move("x", "y"),
    "remove": lambda s, _: s.files.remove("x"),
    "glob": lambda s, _: s.files.glob("*"),
    "grep": lambda s, _: s.files.grep("x"),
    "watch": lambda s, _: _take(s.files.watch()),
    "download": lambda s, _: _take(s.files.download()),
    "upload": lambda s, _: s.files.upload(bytes(1 << 20)),
    "upload in pieces": lambda s, _: s.files.upload(_pieces()),
}
"""Every method that talks to the guest."""


async def outcome_of(
    call: str, machine: HostileMachine, *, within_s: float
) -> ClocheError | BaseException | object:
    """Make one call; return its result, or whatever it raised. A hang is a TimeoutError."""
    sandbox = Sandbox(machine)
    process = Process(sandbox._client, PROCESS_ID, 7)
    try:
        async with asyncio.timeout(within_s):
            return await CALLS[call](sandbox, process)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            raise
        return error


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Yield a function that tells how far this process has grown since, in MiB."""

    def field(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) >> 10
        return 0

    Path("/proc/self/clear_refs").write_text("5")  # Linux 4.0: forget the peak so far.
    before = field("VmRSS")
    yield lambda: field("VmHWM") - before


class Lag:
    """How long the event loop was kept from everyone else, at worst."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.sleep(0.02)
        self._ticking.cancel()

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.worst_s = max(self.worst_s, time.monotonic() - before - 0.01)
