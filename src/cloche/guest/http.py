"""HTTP/1.1 on the machine's channel, as far as the host speaks it.

One connection carries one request. That keeps the server stateless between
calls, and lets a connection become a plain byte stream after an upgrade.

Written out here because the guest starts with every machine: to load a library
for it took longer than all of the guest's own modules. What the host never
sends is refused, not guessed at: no request can be read in two ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

READ_BYTES = 64 * 1024
LINGER_S = 10.0
HEARTBEAT_S = 5.0
"""How often the host is told that a call goes on: it gives a silent guest up for lost."""
JSON_BYTES = 4 * 1024 * 1024

_NAME = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-")
_HEX = frozenset(b"0123456789abcdefABCDEF")
_PHRASES = {
    101: "Switching Protocols", 102: "Processing", 200: "OK", 400: "Bad Request",
    403: "Forbidden", 404: "Not Found", 409: "Conflict", 413: "Content Too Large",
    422: "Unprocessable Content", 500: "Internal Server Error", 507: "Insufficient Storage",
}  # fmt: skip


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
        self._unread: int | None = 0
        """What is still to come of the request's body; None: chunks until an empty one."""
        self._head = b""
        """The answer's head, sent with the first bytes after it."""
        self._chunked = False
        self._heartbeat: asyncio.TimerHandle | None = None

    async def receive(self) -> bool:
        """Read the request's head; return False when the peer left without one."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return False
            raise bad_request("the request's head ends early") from None
        except asyncio.LimitOverrunError:
            raise bad_request("the request's head is too long") from None
        first, *rest = head[:-4].split(b"\r\n")
        self.headers = _fields(rest)
        self._unread = _body_bytes(self.headers)
        self.method, self.path, self.query = _request(first)
        self._beat_later()
        return True

    async def body(self) -> AsyncIterator[bytes]:
        while self._unread is None:
            size = await self._chunk_bytes()
            while size:
                data = await self._read(size)
                size -= len(data)
                yield data
            await self._end_of_chunk()
        while self._unread:
            data = await self._read(self._unread)
            self._unread -= len(data)
            yield data

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
        self._chunked = ("transfer-encoding", "chunked") in headers
        fields = [*headers, ("content-type", content_type), ("connection", "close")]
        self._head = _head(status, fields)

    async def begin_lines(self, first: object | None = None) -> None:
        await self.begin(200, [("transfer-encoding", "chunked")], "application/x-ndjson")
        await (self.send(b"") if first is None else self.line(first))

    async def line(self, value: object) -> None:
        await self.send(json.dumps(value).encode() + b"\n")

    async def send(self, data: bytes) -> None:
        if self._chunked and data:  # An empty chunk would be the end.
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._put(data)
        await self.writer.drain()

    async def end(self) -> None:
        self._put(b"0\r\n\r\n" if self._chunked else b"")
        await self.writer.drain()

    async def linger(self) -> None:
        """Read what the host still sends, until it has read the answer and leaves.

        To close with something unread is a reset, and takes the answer back.
        """
        if self._unread != 0:
            self.writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while await self.reader.read(READ_BYTES):
                        pass

    def check_switch(self) -> None:
        """Refuse a request for a byte stream that does not say it knows what it asks for."""
        if self.headers.get("upgrade") != "tunnel":
            raise bad_request("a tunnel is asked for with an upgrade")

    async def switch(self) -> None:
        """Turn the connection into a byte stream: what comes next on it is not ours."""
        self.check_switch()
        self.answered = True
        self.stop_heartbeat()
        self._put(_head(101, [("connection", "upgrade"), ("upgrade", "tunnel")]))
        await self.writer.drain()

    def beat(self) -> None:
        """Send a sign of life, and the next one when it is due."""
        self.stop_heartbeat()
        self._put(_head(102, []))
        self._beat_later()

    def stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def _beat_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._heartbeat = loop.call_later(HEARTBEAT_S, self.beat)

    def _put(self, data: bytes) -> None:
        whole, self._head = self._head + data, b""
        if whole:
            self.writer.write(whole)

    async def _read(self, size: int) -> bytes:
        data = await self.reader.read(min(size, READ_BYTES))
        if not data:
            raise bad_request("the request's body ends early")
        return data

    async def _chunk_bytes(self) -> int:
        """Return the size of the next chunk; 0 is the end of the body."""
        line = await self._line()
        if not line or len(line) > 8 or not _HEX.issuperset(line):
            raise bad_request("a chunk's size is one to eight hexadecimal digits")
        size = int(line, 16)
        if size == 0:
            self._unread = 0
        return size

    async def _end_of_chunk(self) -> None:
        if await self._line():
            raise bad_request("a chunk is longer than its size, or fields follow the last")

    async def _line(self) -> bytes:
        try:
            return (await self.reader.readuntil(b"\r\n"))[:-2]
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise bad_request("the request's body ends early, or has no end") from None


def _head(status: int, fields: list[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status} {_PHRASES[status]}", *(f"{name}: {text}" for name, text in fields)]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _request(line: bytes) -> tuple[str, str, dict[str, str]]:
    """Take the first line of a request apart: method, path and query."""
    method, _, rest = line.partition(b" ")
    target, _, version = rest.partition(b" ")
    if version != b"HTTP/1.1" or not method.isalpha() or not target.startswith(b"/"):
        raise bad_request("this is not an HTTP/1.1 request")
    if not all(0x21 <= byte <= 0x7E for byte in target):
        raise bad_request("a request's target is printable ASCII")
    path, _, query = target.partition(b"?")
    pairs = (pair.partition(b"=") for pair in query.split(b"&") if pair)
    return (
        method.decode(),
        path.decode(),
        {_unquote(name): _unquote(value) for name, _, value in pairs},
    )


def _fields(lines: list[bytes]) -> dict[str, str]:
    """Read the header fields, each of which comes at most once."""
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        key, text = name.lower(), value.decode("latin-1").strip(" \t")
        plain = value.isascii() and text.isprintable()
        if not colon or not key or not _NAME.issuperset(key) or not plain:
            raise bad_request("a header field is malformed")
        if key.decode() in found:
            raise bad_request(f"the header field {key.decode()} comes twice")
        found[key.decode()] = text
    return found


def _body_bytes(headers: dict[str, str]) -> int | None:
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None:
        if coding != "chunked" or length is not None:
            raise bad_request("a body comes in chunks or by its length, and in no other way")
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > 18:
        raise bad_request("content-length is a number of at most 18 digits")
    return int(length)


def _unquote(text: bytes) -> str:
    """Undo the percent-encoding of a query."""
    first, *rest = text.split(b"%")
    parts = [first]
    for part in rest:
        code = part[:2]
        if len(code) != 2 or not _HEX.issuperset(code):
            raise bad_request("a query is percent-encoded")
        parts += bytes((int(code, 16),)), part[2:]
    try:
        return b"".join(parts).decode()
    except UnicodeDecodeError:
        raise bad_request("a query is UTF-8") from None


def number(exchange: Exchange, name: str, default: int, low: int, high: int) -> int:
    """Read a whole number from the query."""
    text = exchange.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not low <= int(text[:20]) <= high:
        raise bad_request(f"{name} is a whole number from {low} to {high}")
    return int(text)
