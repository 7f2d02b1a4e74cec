"""Machines and backends that misbehave, each in the way it is named for.

They are whole implementations of the protocols, with a guest of a few lines at the
other end of a real socket, so that what is tested against them is the real client,
sandbox and pool.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from cloche.core.errors import (
    MachineNotDestroyed,
    MachineNotStarted,
    NoSuchMachine,
    SandboxLost,
)
from cloche.core.image import Image
from cloche.core.machine import ByteStream, Usage
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec

_numbers = itertools.count(1)

_ENDED_WELL = {
    "code": 0, "signal": None, "timed_out": False, "duration_s": 0.0, "cpu_s": 0.0,
    "max_rss_kib": 0,
}  # fmt: skip
_STARTED = {
    "id": "0" * 16, "pid": 1, "argv": ["true"], "pty": False, "started_at": 0.0,
    "stdout_bytes": 0, "stderr_bytes": 0, "exit": None,
}  # fmt: skip


def answer(*messages: object, status: str = "200 OK") -> bytes:
    """Spell a guest's whole answer: a message, or several of them, one a line."""
    body = b"\n".join(json.dumps(message).encode() for message in messages)
    if len(messages) > 1:
        body += b"\n"
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class IdleMachine:
    """Behaves, and does nothing: it says hello, and that every command has ended well."""

    rung = Rung.CONTAINER

    def __init__(self, spec: SandboxSpec | None = None) -> None:
        self.id = f"fake{next(_numbers):08d}"
        self.spec = spec or SandboxSpec()
        self.paused = False
        self.destroyed = False
        self.calls: list[str] = []
        """The method and path of each call, in order."""
        self.last_body = b""
        """What came with the latest call that had a length."""
        self._connections: set[asyncio.Task[None]] = set()

    async def dial(self) -> ByteStream:
        if not await self.alive():
            raise SandboxLost(f"Machine {self.id} is gone.", remedy="It is a fake: make another.")
        ours, theirs = socket.socketpair()
        task = asyncio.create_task(self._connected(theirs))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        return await asyncio.open_connection(sock=ours)

    async def alive(self) -> bool:
        return not self.destroyed

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def usage(self) -> Usage:
        return Usage(memory_bytes=0, memory_peak_bytes=0, cpu_s=0, processes=1, oom_kills=0)

    async def endure(self) -> None:
        if self.destroyed:
            raise SandboxLost(f"Machine {self.id} is gone.", remedy="It is a fake: make another.")

    async def last_words(self) -> str:
        return "the last words of a fake"

    async def destroy(self) -> None:
        self.destroyed = True
        await self.hang_up()

    async def hang_up(self) -> None:
        """End every connection, in the middle of whatever is said on it."""
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections)

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        if call == "GET /":
            writer.write(answer({"protocol": 1, "uptime_s": 0.0}))
        elif call == "POST /processes?follow=1":
            writer.write(answer({"started": _STARTED}, {"exit": _ENDED_WELL}))
        else:
            refusal = {"code": "bad_request", "message": "a fake does nothing"}
            writer.write(answer(refusal, status="400 Bad Request"))

    async def _connected(self, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=theirs)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            for line in head.lower().splitlines():
                if line.startswith("content-length:"):
                    self.last_body = await reader.readexactly(int(line.split(":")[1]))
            call = " ".join(head.split(" ")[:2])
            self.calls.append(call)
            await self.respond(call, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class SlowMachine(IdleMachine):
    """Answers, but late, and takes as long to say whether it is alive."""

    def __init__(self, spec: SandboxSpec | None = None, *, delay_s: float = 0.2) -> None:
        super().__init__(spec)
        self.delay_s = delay_s

    async def alive(self) -> bool:
        await asyncio.sleep(self.delay_s)
        return await super().alive()

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.delay_s)
        await super().respond(call, writer)


class DeafMachine(IdleMachine):
    """Takes every call and answers none."""

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()


class StallingMachine(DeafMachine):
    """Starts what it is told to and shows signs of life ever after: it ends and kills nothing.

    To calls about files it is deaf.
    """

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        if call == "POST /processes":
            process_id = json.loads(self.last_body)["id"]
            writer.write(answer({**_STARTED, "id": process_id}))
        elif "/output" in call:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            line = json.dumps({"alive": True}).encode() + b"\n"
            while True:
                writer.write(b"%x\r\n%s\r\n" % (len(line), line))
                await writer.drain()
                await asyncio.sleep(0.2)
        else:
            await super().respond(call, writer)


class DyingMachine(IdleMachine):
    """Dies in the middle of a call, once it has answered `calls_left`."""

    def __init__(self, spec: SandboxSpec | None = None, *, calls_left: int = 0) -> None:
        super().__init__(spec)
        self.calls_left = calls_left

    async def alive(self) -> bool:
        return self.calls_left >= 0 and await super().alive()

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        self.calls_left -= 1
        if self.calls_left >= 0:
            await super().respond(call, writer)
        else:
            writer.write(answer({"started": _STARTED}, {"exit": _ENDED_WELL})[:-60])


class LyingMachine(IdleMachine):
    """Answers every call with the same bytes, whatever they are."""

    def __init__(self, spec: SandboxSpec | None = None, *, says: bytes = b"") -> None:
        super().__init__(spec)
        self.says = says

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        writer.write(self.says)


class BabblingMachine(LyingMachine):
    """Says something, and then something else, over and over, without an end."""

    def __init__(
        self, spec: SandboxSpec | None = None, *, says: bytes = b"", forever: bytes = b"x"
    ) -> None:
        super().__init__(spec, says=says)
        self.forever = forever * (65536 // len(forever) + 1)

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        await super().respond(call, writer)
        while True:
            writer.write(self.forever)
            await writer.drain()


class StubbornMachine(IdleMachine):
    """Is not destroyed until it has been tried `tries` times."""

    def __init__(self, spec: SandboxSpec | None = None, *, tries: int = 2) -> None:
        super().__init__(spec)
        self.tries = tries

    async def destroy(self) -> None:
        self.tries -= 1
        if self.tries > 0:
            raise MachineNotDestroyed(
                f"Machine {self.id} is not gone.", remedy="It is a fake: try again."
            )
        await super().destroy()


class IdleBackend:
    """Makes machines at once, of whatever kind it is given."""

    rung = Rung.CONTAINER

    def __init__(self, kind: Callable[[SandboxSpec], IdleMachine] = IdleMachine) -> None:
        self.kind = kind
        self.machines: list[IdleMachine] = []
        """Every machine that was ever made, in order."""

    @property
    def left(self) -> list[str]:
        """The machines that nobody destroyed."""
        return [machine.id for machine in self.machines if not machine.destroyed]

    async def check(self) -> str:
        return "a fake"

    async def create(
        self, spec: SandboxSpec, image: Image, *, durable: bool = False
    ) -> IdleMachine:
        machine = self.kind(spec)
        self.machines.append(machine)
        return machine

    async def adopt(self, machine_id: str) -> IdleMachine:
        for machine in self.machines:
            if machine.id == machine_id and await machine.alive():
                return machine
        raise NoSuchMachine(f"No machine {machine_id!r} is alive here.", remedy="Make another.")

    async def sweep(self, *, keep: Sequence[str] | None = None) -> list[str]:
        return []

    def layers(self) -> set[Path]:
        return set()


class SlowBackend(IdleBackend):
    """Takes its time to make a machine, and minds being interrupted."""

    def __init__(
        self,
        kind: Callable[[SandboxSpec], IdleMachine] = IdleMachine,
        *,
        delay_s: float = 0.2,
    ) -> None:
        super().__init__(kind)
        self.delay_s = delay_s

    async def create(
        self, spec: SandboxSpec, image: Image, *, durable: bool = False
    ) -> IdleMachine:
        machine = await super().create(spec, image, durable=durable)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            await machine.destroy()
            raise
        return machine


class FailingBackend(IdleBackend):
    """Fails to make the first machines, and makes the others."""

    def __init__(
        self,
        kind: Callable[[SandboxSpec], IdleMachine] = IdleMachine,
        *,
        failures: int = 1,
    ) -> None:
        super().__init__(kind)
        self.failures = failures

    async def create(
        self, spec: SandboxSpec, image: Image, *, durable: bool = False
    ) -> IdleMachine:
        if self.failures > 0:
            self.failures -= 1
            raise MachineNotStarted("The machine did not start.", remedy="It is a fake: wait.")
        return await super().create(spec, image, durable=durable)
