"""HTTP/1.1 on the machine's channel: h11 does the protocol, this does the sockets.

One connection carries one request. That keeps the server stateless between
calls, and lets a connection become a plain byte stream after an upgrade.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import h11

READ_BYTES = 64 * 1024
LINGER_S = 10.0
HEARTBEAT_S = 5.0
"""How often the host is told that a call goes on: it gives a silent guest up for lost."""
JSON_BYTES = 4 * 1024 * 1024


class Refusal(Exception):
    """An answer other than the one hoped for; `code` names it for the host."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def bad_request(message: str) -> Refusal:
    return Refusal(400, "bad_request", message)


class Exchange:
    """One request and its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.method = ""
        self.path = ""
        self.query: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.answered = False
        self._http = h11.Connection(h11.SERVER)
        self._heartbeat: asyncio.TimerHandle | None = None

    async def receive(self) -> bool:
        """Read the request's head; return False when the peer left without one."""
        event = await self._next()
        if not isinstance(event, h11.Request):
            return False
        url = urlsplit(event.target.decode("ascii"))
        self.method = event.method.decode("ascii")
        self.path = url.path
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.headers = {name.decode(): value.decode() for name, value in event.headers}
        self._beat_later()
        return True

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def json(self) -> dict[str, Any]:
        raw = bytearray()
        async for data in self.body():
            raw += data
            if len(raw) > JSON_BYTES:
                raise Refusal(413, "bad_request", f"a request is at most {JSON_BYTES} bytes")
        try:
            value = json.loads(raw)
        except ValueError as error:
            raise bad_request(f"the request is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise bad_request("the request is not a JSON object")
        return value

    async def answer(self, value: object, status: int = 200) -> None:
        raw = json.dumps(value).encode()
        await self.begin(status, [("content-length", str(len(raw)))], "application/json")
        await self.send(raw)
        await self.end()

    async def begin(self, status: int, headers: list[tuple[str, str]], content_type: str) -> None:
        self.answered = True
        self.stop_heartbeat()
        fields = [*headers, ("content-type", content_type), ("connection", "close")]
        self._put(h11.Response(status_code=status, headers=fields))

    async def begin_lines(self) -> None:
        await self.begin(200, [("transfer-encoding", "chunked")], "application/x-ndjson")

    async def line(self, value: object) -> None:
        await self.send(json.dumps(value).encode() + b"\n")

    async def send(self, data: bytes) -> None:
        self._put(h11.Data(data=data))
        await self.writer.drain()

    async def end(self) -> None:
        self._put(h11.EndOfMessage())
        await self.writer.drain()

    async def linger(self) -> None:
        """Read what the host still sends, until it has read the answer and leaves.

        To close with something unread is a reset, and takes the answer back.
        """
        if self._http.their_state is h11.SEND_BODY:
            self.writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while await self.reader.read(READ_BYTES):
                        pass

    async def switch(self) -> bytes:
        """Turn the connection into a byte stream; return what was already received of it."""
        self.answered = True
        self.stop_heartbeat()
        self._put(
            h11.InformationalResponse(
                status_code=101, headers=[("connection", "upgrade"), ("upgrade", "tunnel")]
            )
        )
        await self.writer.drain()
        return self._http.trailing_data[0]

    def stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def _beat_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._heartbeat = loop.call_later(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        self._put(h11.InformationalResponse(status_code=102, headers=[]))
        self._beat_later()

    def _put(self, event: h11.Event) -> None:
        # h11 returns None only for ConnectionClosed, which is never sent here.
        self.writer.write(self._http.send(event) or b"")

    async def _next(self) -> object:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    self._put(h11.InformationalResponse(status_code=100, headers=[]))
                self._http.receive_data(await self.reader.read(READ_BYTES))
            else:
                return event


def number(exchange: Exchange, name: str, default: int, low: int, high: int) -> int:
    """Read a whole number from the query."""
    text = exchange.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not low <= int(text[:20]) <= high:
        raise bad_request(f"{name} is a whole number from {low} to {high}")
    return int(text)
