"""Speaks with a program that wants out: HTTP proxy (RFC 9110, 9112) or SOCKS5 (RFC 1928).

Both on one port, told apart by their first byte. The program is hostile: what it sends is
read strictly, whole and in time, and what goes on to the world is written anew from what
was understood, so that nobody behind us can read it in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import h11

from cloche.core.machine import ByteStream
from cloche.sandbox.dialling import Fault, Refused
from cloche.sandbox.line import Line, Via

HEAD_S: Final = 15.0
"""How long a program may take to say what it wants."""
KEEP_S: Final = 60.0
"""The same, for its next request on a connection."""
HEAD_BYTES: Final = 32 * 1024
_READ_BYTES: Final = 32 * 1024

Open = Callable[[str, int, Via], AbstractAsyncContextManager[Line]]

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_TARGET = re.compile(r"(?i:http)://([^/?#\\@]+)(/[^#\\]*|\?[^#\\]*)?")
_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer"
    b" transfer-encoding upgrade expect".split()
)
_FRAMING = frozenset((b"host", b"content-length", b"transfer-encoding"))

_STATUS: Final[dict[Fault, tuple[int, str]]] = {
    "denied": (403, "http_request_denied"),
    "address": (403, "destination_ip_prohibited"),
    "limit": (403, "http_request_denied"),
    "name": (502, "dns_error"),
    "refused": (502, "connection_refused"),
    "timeout": (504, "connection_timeout"),
    "broken": (502, "connection_terminated"),
}
_REPLY: Final[dict[Fault, int]] = {
    "denied": 2, "address": 2, "limit": 2, "name": 4, "refused": 5, "timeout": 4, "broken": 1,
}  # fmt: skip
_PHRASES = {400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 431: "Head Too Large",
            502: "Bad Gateway", 504: "Gateway Timeout"}  # fmt: skip


class Malformed(Exception):
    """What the program sent is nothing we go on with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


async def serve(client: ByteStream, open_: Open) -> None:
    """Serve one connection of a program to its end. Both sides' breaking is an end."""
    reader, writer = client
    try:
        async with asyncio.timeout(HEAD_S):
            first = await reader.readexactly(1)
        if first == b"\x05":
            await _serve_socks(client, open_)
        elif first.isalpha():
            await _Http(client, open_).serve(first)
        else:
            writer.write(_error(400, "http_protocol_error", "this is neither HTTP nor SOCKS5"))
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, Refused):
        return


def split_authority(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Read `HOST:PORT`, as a request's target has it.

    Raises:
        Malformed: it is something else.
    """
    found = _AUTHORITY.fullmatch(text)
    if found is None or len(found[1]) > 255:
        raise Malformed("the target is no host and port")
    host, digits = found[1], found[2]
    if digits is None and default_port is None:
        raise Malformed("the target has no port")
    port = int(digits) if digits is not None else default_port or 0
    if not 1 <= port <= 65535:
        raise Malformed("the target's port is none")
    if host.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host[1:-1])), port
        except ValueError:
            raise Malformed("the target's address is none") from None
    return host, port


class _Http:
    """A program that speaks HTTP: one request after the other, each judged by itself."""

    def __init__(self, client: ByteStream, open_: Open) -> None:
        self._reader, self._writer = client
        self._open = open_
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._tunnelling = False

    async def serve(self, first: bytes) -> None:
        self._http.receive_data(first)
        patience = HEAD_S
        try:
            while (request := await self._request(patience)) is not None:
                if not await self._answer(request):
                    return
                patience = KEEP_S
                self._http.start_next_cycle()
        except Malformed as error:
            self._refuse(error.status, "http_protocol_error", str(error))
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint if error.error_status_hint in _PHRASES else 400
            self._refuse(status, "http_protocol_error", "this is not plain HTTP/1.1")
        except Refused as refused:
            self._refuse(*_STATUS[refused.fault], refused.message)

    def _refuse(self, status: int, kind: str, message: str) -> None:
        unanswered = self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE, h11.ERROR)
        if unanswered and not self._tunnelling:
            self._writer.write(_error(status, kind, message))
        else:
            self._writer.transport.abort()  # Or half an answer would be taken as whole.

    async def _request(self, patience: float) -> h11.Request | None:
        async with asyncio.timeout(patience):
            event = await self._next()
        return event if isinstance(event, h11.Request) else None

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event

    async def _answer(self, request: h11.Request) -> bool:
        """Carry a request out; tell whether the connection is good for another."""
        check(request)
        target = request.target.decode("ascii")
        if request.method == b"CONNECT":
            await self._connect(*split_authority(target))
            return False
        found = _TARGET.fullmatch(target)
        if found is None:
            raise Malformed("a proxy is asked for http://HOST/PATH, or to CONNECT")
        host, port = split_authority(found[1], 80)
        return await self._forward(request, host, port, found[1], found[2] or "/")

    async def _connect(self, host: str, port: int) -> None:
        async with self._open(host, port, "connect") as line:
            self._tunnelling = True
            self._writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self._next()  # h11 stops here, and keeps what came after the head.
            await line.relay((self._reader, self._writer), self._http.trailing_data[0])

    async def _forward(
        self, request: h11.Request, host: str, port: int, authority: str, path: str
    ) -> bool:
        async with self._open(host, port, "http") as line:
            server = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
            headers = [
                (b"host", authority.encode()),
                *kept(list(request.headers)),
                (b"connection", b"close"),
            ]
            if framed_by_chunks(request):
                headers.append((b"transfer-encoding", b"chunked"))
            target = path if path.startswith("/") else f"/{path}"
            asked = h11.Request(method=request.method, target=target, headers=headers)
            await line.send(server.send(asked) or b"")
            done = await self._exchange(server, line)
        return done and self._http.our_state is h11.DONE

    async def _exchange(self, server: h11.Connection, line: Line) -> bool:
        """Pass the request's body on and the answer back; tell whether both came to an end.

        At the same time: a server may answer before it has heard all.
        """
        sending = asyncio.ensure_future(self._send_body(server, line))
        returning = asyncio.ensure_future(self._return(server, line))
        try:
            await asyncio.wait((sending, returning), return_when=asyncio.FIRST_COMPLETED)
            if not returning.done():
                sending.result()
                await returning
            returning.result()
            return sending.done() and self._http.their_state is h11.DONE
        finally:
            sending.cancel()
            returning.cancel()
            await asyncio.gather(sending, returning, return_exceptions=True)

    async def _send_body(self, server: h11.Connection, line: Line) -> None:
        if self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._writer.write(self._http.send(go_on) or b"")
        while isinstance(event := await self._next(), h11.Data | h11.EndOfMessage):
            with contextlib.suppress(ConnectionError):  # The answer may have come before.
                end = isinstance(event, h11.EndOfMessage)
                await line.send(server.send(h11.EndOfMessage() if end else event) or b"")
            if isinstance(event, h11.EndOfMessage):
                return

    async def _return(self, server: h11.Connection, line: Line) -> None:
        """Pass the answer on. One that breaks off is broken off here, too."""
        try:
            while True:
                event = server.next_event()
                if event is h11.NEED_DATA:
                    server.receive_data(await line.read())
                elif isinstance(event, h11.InformationalResponse):
                    continue
                elif isinstance(event, h11.Response):
                    headers = kept(list(event.headers), chunked=framed_by_chunks(event))
                    await self._send(
                        h11.Response(
                            status_code=event.status_code, headers=headers, reason=event.reason
                        )
                    )
                elif isinstance(event, h11.Data):
                    await self._send(event)
                elif isinstance(event, h11.EndOfMessage):
                    await self._send(h11.EndOfMessage())
                    return
                else:
                    raise Refused("broken", f"{line.name} closed the connection")
        except (h11.RemoteProtocolError, h11.LocalProtocolError):
            raise Refused("broken", f"{line.name} does not answer in plain HTTP/1.1") from None

    async def _send(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()


def check(request: h11.Request) -> None:
    """Refuse what two readers could understand differently.

    Raises:
        Malformed: what is wrong.
    """
    names = [name for name, _ in request.headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        raise Malformed("the request has a length and comes in chunks")
    if request.http_version not in (b"1.0", b"1.1"):
        raise Malformed("this is neither HTTP/1.1 nor HTTP/1.0")
    if request.http_version != b"1.1" and b"transfer-encoding" in names:
        raise Malformed("the request comes in chunks, but not in HTTP/1.1")
    if request.method == b"CONNECT" and not {b"content-length", b"transfer-encoding"}.isdisjoint(
        names
    ):
        raise Malformed("a CONNECT has no body")
    if not named(list(request.headers)).isdisjoint(_FRAMING):
        raise Malformed("the request takes its own length back")


def named(headers: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the fields that `Connection` names: they are for this hop alone."""
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(part.strip().lower() for value in values for part in value.split(b","))


def kept(headers: list[tuple[bytes, bytes]], *, chunked: bool = False) -> list[tuple[bytes, bytes]]:
    """Return the fields that go on to the next hop, but for what is written anew there."""
    dropped = _HOP | named(headers) | {b"host"} | ({b"content-length"} if chunked else set())
    return [(name, value) for name, value in headers if name not in dropped]


def framed_by_chunks(message: h11.Request | h11.Response) -> bool:
    return any(name == b"transfer-encoding" for name, _ in message.headers)


def _error(status: int, kind: str, message: str) -> bytes:
    """Write an answer that a tool shows: a line of text, and RFC 9209's reason for programs."""
    text = f"Cloche: {message}.\n".encode("ascii", "replace")
    quoted = message.replace("\\", "").replace('"', "'")
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\n"
        "content-type: text/plain\r\n"
        f"content-length: {len(text)}\r\n"
        f'proxy-status: cloche; error={kind}; details="{quoted}"\r\n'
        "connection: close\r\n\r\n"
    )
    return head.encode("ascii", "replace") + text


async def _serve_socks(client: ByteStream, open_: Open) -> None:
    reader, writer = client
    async with asyncio.timeout(HEAD_S):
        methods = await reader.readexactly((await reader.readexactly(1))[0])
        if 0 not in methods:
            writer.write(b"\x05\xff")
            return
        writer.write(b"\x05\x00")
        _, command, _, kind = await reader.readexactly(4)
        host = await _socks_host(reader, kind)
        port = int.from_bytes(await reader.readexactly(2), "big")
    if command != 1 or not host or not port:
        writer.write(_reply(7 if command != 1 else 8))
        return
    answered = False
    try:
        async with open_(host, port, "socks5") as line:
            answered = True
            writer.write(_reply(0))
            await line.relay(client)
    except Refused as refused:
        if answered:
            writer.transport.abort()
        else:
            writer.write(_reply(_REPLY[refused.fault]))


async def _socks_host(reader: asyncio.StreamReader, kind: int) -> str:
    """Read where to: an address, or a name that is looked up here; nothing for neither."""
    if kind == 1:
        return str(ipaddress.IPv4Address(await reader.readexactly(4)))
    if kind == 4:
        return str(ipaddress.IPv6Address(await reader.readexactly(16)))
    if kind != 3:
        return ""
    name = await reader.readexactly((await reader.readexactly(1))[0])
    found = re.fullmatch(rb"[A-Za-z0-9._:-]+", name)
    return name.decode("ascii") if found else ""


def _reply(code: int) -> bytes:
    return bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))
