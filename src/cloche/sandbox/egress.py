"""A machine's way out: what its programs may connect to, decided and dialled on the host.

The machine has no network. The host holds a few streams to its guest ready; each becomes
one connection of a program inside, which speaks to the proxy here. So the machine can use
no more streams than the host opens, and the host sees every name before it is looked up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from cloche.core.errors import ClocheError, MachinePaused, NoSuchMachine, SandboxLost
from cloche.core.machine import ByteStream
from cloche.core.network import Attempt, Policy, Verdict, decide
from cloche.sandbox import proxy, wire
from cloche.sandbox.dialling import BUFFER_BYTES, Dialler, Refused
from cloche.sandbox.line import Line, Via
from cloche.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)

PORT: Final = 3128
IDLE_S: Final = 600.0
"""How long a connection may carry nothing."""
HALF_CLOSED_S: Final = 60.0
"""The same, once one side has said that it is done."""
_SPARE: Final = 4
"""Streams that wait for a program at once."""
_LOOK_S: Final = 1.0
_RETRY_S: Final = 1.0
_CLOSE_S: Final = 30.0

Tell = Callable[[Attempt], None]


class Egress:
    """The proxy of one machine, for as long as it is to have a network.

    What was open when a host is killed is cut; whoever adopts the machine makes a new one.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        policy: Policy,
        dialler: Dialler,
        *,
        tell: Tell,
        port: int = PORT,
        spent_bytes: int = 0,
    ) -> None:
        self.port = port
        self.spent_bytes = spent_bytes
        """What went in and out so far, under this policy's `max_bytes`."""
        self._sandbox = sandbox
        self._policy = policy
        self._dialler = dialler
        self._tell = tell
        self._lines: set[Line] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._arming: list[asyncio.Task[None]] = []
        self._streams = 0
        self._room = asyncio.Event()
        self._listening = asyncio.Event()

    async def start(self) -> None:
        """Open the way; on return, programs in the machine can connect.

        Raises:
            PortTaken: a program in the machine listens on the proxy's port.
            SandboxLost, GuestMisbehaved: there is no machine to open it for.
        """
        holding = asyncio.ensure_future(self._hold())
        listening = asyncio.ensure_future(self._listening.wait())
        try:
            await asyncio.wait((holding, listening), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            holding.cancel()
            raise
        finally:
            listening.cancel()
        if holding.done():
            holding.result()
        self._arming = [
            asyncio.create_task(self._arm(self._hold, holding)),
            *(asyncio.create_task(self._arm(self._next)) for _ in range(_SPARE)),
            asyncio.create_task(self._watch()),
        ]

    async def stop(self) -> None:
        """Close the way, and cut what is open. Idempotent."""
        arming, self._arming = self._arming, []
        for line in list(self._lines):
            line.cut("the network was taken away")
        tasks = [*arming, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def open_connections(self) -> int:
        return len(self._lines)

    def change(self, policy: Policy) -> None:
        """Let another policy hold from now on; what it does not allow is cut."""
        self._policy = policy
        for line in list(self._lines):
            verdict = decide(policy, line.name, line.port)
            led = line.address and not self._dialler.permits(line.address, verdict)
            if not verdict.allowed or led:
                line.cut("the network's policy was changed")
        self._room.set()

    async def _arm(
        self,
        source: Callable[[], Awaitable[ByteStream]],
        waiting: asyncio.Future[ByteStream] | None = None,
    ) -> None:
        """Hold one stream ready, and another one as soon as it is taken."""
        while True:
            try:
                stream = await (waiting or source())
            except MachinePaused:
                await asyncio.sleep(_RETRY_S)
            except (SandboxLost, NoSuchMachine):
                return  # Whoever runs it will find out.
            except ClocheError as error:
                logger.warning("network of machine %s: %s", self._sandbox.id, error)
                await asyncio.sleep(_RETRY_S)
            else:
                task = asyncio.create_task(self._serve(stream))
                self._serving.add(task)
                task.add_done_callback(self._served)
            waiting = None

    async def _hold(self) -> ByteStream:
        """Keep the port open, also while every stream is in use. Does not return."""
        stream = await self._sandbox.accept(
            port=self.port, hold=True, on_listening=self._listening.set
        )
        stream[1].transport.abort()
        raise wire.misbehaved("a connection where none was asked for")

    async def _next(self) -> ByteStream:
        """Wait for a program to connect. A stream that waits counts as a connection."""
        while self._streams >= self._policy.max_connections:
            self._room.clear()
            await self._room.wait()
        self._streams += 1
        try:
            return await self._sandbox.accept(port=self.port)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        self._streams -= 1
        self._room.set()

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("network of machine %s: a fault of ours", self._sandbox.id, exc_info=error)

    async def _serve(self, stream: ByteStream) -> None:
        stream[1].transport.set_write_buffer_limits(high=BUFFER_BYTES)
        try:
            await proxy.serve(stream, self._open)
            stream[1].close()
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_CLOSE_S):
                    await stream[1].wait_closed()
        finally:
            # A guest that takes nothing in would be waited for until the end of days.
            stream[1].transport.abort()

    @contextlib.asynccontextmanager
    async def _open(self, name: str, port: int, via: Via) -> AsyncIterator[Line]:
        """Judge, dial, and see that the attempt is told, however it ends."""
        line = Line(name, port, via, self._spend)
        self._lines.add(line)
        error: BaseException | None = None
        try:
            await self._join(line)
            yield line
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._lines.discard(line)
            line.close()
            self._tell(line.attempt(error))

    async def _join(self, line: Line) -> None:
        line.verdict = self._judge(line)
        self._spend(0)
        stream, address = await self._dialler.open(line.name, line.port, line.verdict)
        line.joined(stream, address)
        # The policy may have been changed while we dialled.
        line.verdict = self._judge(line)
        if not self._dialler.permits(address, line.verdict):
            raise _denied(line)

    def _judge(self, line: Line) -> Verdict:
        verdict = decide(self._policy, line.name, line.port)
        if not verdict.allowed:
            raise _denied(line)
        return verdict

    def _spend(self, count: int) -> None:
        self.spent_bytes += count
        most = self._policy.max_bytes
        if most is not None and self.spent_bytes > most:
            raise Refused("limit", f"this machine's network has carried its {most} bytes")

    async def _watch(self) -> None:
        """Cut connections that nobody uses."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for line in list(self._lines):
                patience = HALF_CLOSED_S if line.half_closed else IDLE_S
                if now - line.used_at > patience:
                    line.cut(f"nothing was sent for {patience:g} s")


def _denied(line: Line) -> Refused:
    return Refused(
        "denied", f"this machine's network policy does not allow {line.name} port {line.port}"
    )
