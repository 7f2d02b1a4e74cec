"""Calls the guest: one call, one connection, and a bound on everything that comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

import h11

from cloche.core import errors
from cloche.core.machine import ByteStream, Machine
from cloche.sandbox import wire

ANSWER_S: Final = 30.0
"""How long a living guest may take to say something whole: it sends a sign of life every 5 s."""
_BEATS: Final = 20
"""Signs of life before an answer that is to be had at once; before another, one a second more."""
REPLY_BYTES: Final = 16 * 1024 * 1024
LINE_BYTES: Final = 512 * 1024
HEAD_BYTES: Final = 16 * 1024
_REFUSAL_BYTES: Final = 128 * 1024
_TURN: Final = 256
"""Events from one guest before others have their turn: a chunk may hold a single byte."""
_READ_BYTES: Final = 256 * 1024
_STREAMS: Final = ("/tunnel", "/egress")
"""Calls whose answer is a byte stream."""

_REFUSALS: Final[dict[str, tuple[type[errors.ClocheError], str]]] = {
    "bad_request": (errors.BadRequest, "Correct the value and try again."),
    "not_started": (
        errors.CommandNotStarted,
        "Check the program's name and the working folder; the machine has its own file system.",
    ),
    "no_such_process": (errors.NoSuchProcess, "List the sandbox's processes for their ids."),
    "process_exists": (errors.ProcessExists, "Attach to it instead."),
    "stdin_closed": (errors.InputClosed, "Start the process with stdin, and before it ends."),
    "no_such_file": (errors.NoSuchFile, "List the folder to see what is there."),
    "path_refused": (
        errors.PathRefused,
        "Use a path below /workspace, /home/user or /tmp that the machine's user may touch.",
    ),
    "file_refused": (errors.FileRefused, "Look at what is there with stat or list."),
    "tool_failed": (errors.FileRefused, "Check the archive or the path."),
    "machine_full": (
        errors.MachineFull,
        "Free some of the machine's disk or processes, or make a sandbox with higher limits.",
    ),
    "port_closed": (errors.PortClosed, "Start a server there, or wait until it listens."),
    "port_taken": (errors.PortTaken, "End that program, or have it listen on another port."),
    "kill_failed": (errors.GuestMisbehaved, "Destroy the sandbox."),
    "guest_fault": (errors.GuestMisbehaved, "Destroy the sandbox, and please report this."),
}

W = TypeVar("W", bound=wire.Wire)
Query = Mapping[str, str | int | bool | None]


class Client:
    """The host's end of one machine's channel."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def call(
        self,
        kind: type[W],
        method: str,
        path: str,
        query: Query | None = None,
        body: bytes | AsyncIterable[bytes] = b"",
        *,
        timeout_s: float | None = ANSWER_S,
    ) -> W:
        """Make one call whose answer is a single message. Raises what `Sandbox` documents."""
        return wire.parse(kind, await self.fetch(method, path, query, body, timeout_s=timeout_s))

    async def fetch(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: bytes | AsyncIterable[bytes] = b"",
        *,
        timeout_s: float | None = ANSWER_S,
        limit: int = REPLY_BYTES,
    ) -> bytes:
        """Make one call and read the whole answer, up to `limit` bytes."""
        reply = bytearray()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.open(method, path, query, body) as exchange,
            ):
                async for data in exchange.body():
                    reply += data
                    if len(reply) > limit:
                        raise errors.ReplyTooLarge(
                            f"The answer is larger than {limit} bytes.",
                            remedy="Ask for a part of it, or allow more.",
                        )
        except TimeoutError:
            raise self.silent() from None
        return bytes(reply)

    async def lines(
        self,
        kind: type[W],
        method: str,
        path: str,
        query: Query | None = None,
        body: bytes = b"",
    ) -> AsyncGenerator[W, None]:
        """Make one call whose answer is a message a line, for as long as the guest goes on."""
        async with self.open(method, path, query, body, prompt=True) as exchange:
            rest = bytearray()
            async for data in exchange.body():
                rest += data
                # Looked for in `data` alone: a line that comes byte by byte is not to be
                # copied for each of them.
                if b"\n" in data:
                    *whole, rest = rest.split(b"\n")
                    exchange.heard()
                    for line in whole:
                        yield wire.parse(kind, line)
                if len(rest) > LINE_BYTES:
                    raise wire.misbehaved("a line without an end")
            if rest:
                raise wire.misbehaved("half a line")

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: bytes | AsyncIterable[bytes] = b"",
        *,
        prompt: bool = False,
        on_sign: Callable[[], None] | None = None,
    ) -> AsyncIterator[Exchange]:
        """Make one call; read its answer from the exchange. A refusal is raised.

        `prompt`: the answer begins at once, though it may be long. `on_sign` is called at
        each sign of life before the answer.
        """
        if self._machine.paused:
            raise errors.MachinePaused(
                f"Machine {self._machine.id} is paused.", remedy="Resume it first."
            )
        stream = await self._machine.dial()
        exchange = Exchange(stream, self, prompt=prompt, on_sign=on_sign)
        try:
            await exchange.request(method, _target(path, query or {}), body)
            yield exchange
        except (ConnectionError, asyncio.IncompleteReadError):
            raise self.lost() from None
        except h11.RemoteProtocolError as error:
            raise wire.misbehaved(str(error)) from None
        finally:
            exchange.close()

    @property
    def paused(self) -> bool:
        return self._machine.paused

    def lost(self) -> errors.SandboxLost:
        return errors.SandboxLost(
            f"Machine {self._machine.id} is gone in the middle of a call.",
            remedy="Make a new sandbox and run it again.",
        )

    def silent(self) -> errors.GuestMisbehaved:
        return errors.GuestMisbehaved(
            f"The guest of machine {self._machine.id} does not answer.",
            remedy="Destroy the sandbox: it is overloaded, or its guest was taken over.",
        )


class Exchange:
    """One call in progress."""

    def __init__(
        self,
        stream: ByteStream,
        client: Client,
        *,
        prompt: bool,
        on_sign: Callable[[], None] | None = None,
    ) -> None:
        self.reader, self.writer = stream
        self.size: int | None = None
        """The size of the file that the answer is a part of."""
        self._client = client
        self._prompt = prompt
        self._on_sign = on_sign
        self._handed_over = False
        self._waited_s = 0.0
        self._events = 0
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)

    async def request(self, method: str, target: str, body: bytes | AsyncIterable[bytes]) -> None:
        if isinstance(body, bytes):
            headers = [("host", "guest"), ("content-length", str(len(body)))]
        else:
            headers = [("host", "guest"), ("transfer-encoding", "chunked")]
        if target.startswith(_STREAMS):
            headers += [("connection", "upgrade"), ("upgrade", "tunnel")]
        self._send(h11.Request(method=method, target=target, headers=headers))
        if isinstance(body, bytes):
            self._send(h11.Data(data=body))
            self._send(h11.EndOfMessage())
            response = await self._answer()
        else:
            response = await self._stream(body)
        if isinstance(response, h11.Response):
            if response.status_code != 200:
                await self._refuse()
            if target.startswith(_STREAMS):
                raise wire.misbehaved("an answer where a tunnel was asked for")
        self.size = _size(response)

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionResetError

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield a body that is worth something in parts: each is a sign of life."""
        async for data in self.body():
            self.heard()
            yield data

    def heard(self) -> None:
        """Take note that something whole has come: the guest may be silent anew."""
        self._waited_s = 0.0

    def hand_over(self) -> ByteStream:
        """Give the connection away as a byte stream, after a switch of protocols."""
        early, _ = self._http.trailing_data
        self.reader.feed_data(early)
        self._handed_over = True
        return self.reader, self.writer

    def close(self) -> None:
        if self._handed_over:
            return
        transport = self.writer.transport
        # `close` alone would wait, for ever, until a guest that takes nothing in has taken
        # in what is still to be sent.
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()

    async def _stream(self, body: AsyncIterable[bytes]) -> h11.Response | h11.InformationalResponse:
        """Send a body as it comes, and stop at an early answer: it is a refusal."""
        answer = asyncio.ensure_future(self._answer())
        sending = asyncio.ensure_future(self._send_all(body))
        try:
            await asyncio.wait((answer, sending), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await sending
            return await answer
        finally:
            answer.cancel()
            sending.cancel()
            await asyncio.gather(answer, sending, return_exceptions=True)

    async def _send_all(self, body: AsyncIterable[bytes]) -> None:
        async for data in body:
            self._send(h11.Data(data=data))
            await self.writer.drain()
        self._send(h11.EndOfMessage())

    def _send(self, event: h11.Event) -> None:
        self.writer.write(self._http.send(event) or b"")

    async def _answer(self) -> h11.Response | h11.InformationalResponse:
        loop = asyncio.get_running_loop()
        began, beats = loop.time(), 0
        while True:
            event = await self._next()
            self.heard()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError
            if event.status_code == 101:  # h11 lets it pass only where it was asked for.
                return event
            beats += 1
            most = _BEATS if self._prompt else _BEATS + loop.time() - began
            if event.status_code != 102 or beats > most:
                raise wire.misbehaved(f"status {event.status_code}, {beats} times")
            if self._on_sign is not None:
                self._on_sign()

    async def _refuse(self) -> None:
        raw = bytearray()
        async for data in self.body():
            raw += data
            if len(raw) > _REFUSAL_BYTES:
                raise wire.misbehaved("an endless refusal")
        refused = wire.parse(wire.Refused, raw)
        kind, remedy = _REFUSALS.get(refused.code, (None, ""))
        if kind is None:
            raise wire.misbehaved(f"refusal {refused.code}")
        raise kind(wire.clean(refused.message), remedy=remedy)

    async def _next(self) -> object:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                self._events += 1
                if self._events % _TURN == 0:
                    await asyncio.sleep(0)
                return event
            data = await self._receive()
            if not data:  # The guest ends an answer before its connection.
                raise ConnectionResetError
            self._http.receive_data(data)

    async def _receive(self) -> bytes:
        """Read what there is; raise when something whole is too long in coming.

        Counted over all reads for it: else a guest that sends a byte now and then
        would be waited for until the end of days.
        """
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                async with asyncio.timeout(ANSWER_S - self._waited_s):
                    data = await self.reader.read(_READ_BYTES)
            except TimeoutError:
                if not self._client.paused:  # A paused machine is silent by order.
                    raise self._client.silent() from None
                self.heard()
            else:
                self._waited_s += loop.time() - began
                return data


def half_a_character() -> errors.BadRequest:
    return errors.BadRequest(
        "A text holds half a character (a lone surrogate).",
        remedy="Send text in whole characters, and other bytes as stdin or as a file.",
    )


def _target(path: str, query: Query) -> str:
    fields = {
        name: int(value) if isinstance(value, bool) else value
        for name, value in query.items()
        if value is not None
    }
    try:
        return f"{path}?{urlencode(fields, quote_via=quote)}" if fields else path
    except UnicodeEncodeError:
        raise half_a_character() from None


def _size(response: h11.Response | h11.InformationalResponse) -> int | None:
    for name, value in response.headers:
        if name == b"x-file-size":
            if not value.isdigit() or len(value) > 19:
                raise wire.misbehaved("the size of a file")
            return int(value)
    return None
