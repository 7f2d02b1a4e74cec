"""The way out: a program's connection, handed to the host on a stream that the host holds ready.

The machine has no network. A program connects to a port of loopback that the guest
listens on, and each such connection is joined to one stream that the host has opened
and waits on. So nothing leaves but over streams that the host chose to open; what is
more waits in the kernel's queue, and takes nothing of ours.
"""

from __future__ import annotations

import asyncio
import errno
import socket

from cloche.guest.http import Exchange, Refusal, number
from cloche.guest.tunnel import pump

PORT = 3128
_BACKLOG = 1024


class Egress:
    """The ports that programs may connect to, each for as long as the host has a stream for it."""

    def __init__(self) -> None:
        self._listeners: dict[int, _Listener] = {}

    async def accept(self, exchange: Exchange) -> None:
        """Wait for a program to connect; then the host's stream is that program's connection.

        With `hold`, only keep the port open: those who wait there are not to be turned away
        when for a moment the host has no other stream.
        """
        exchange.check_switch()
        port = number(exchange, "port", PORT, 1, 65535)
        listener = self._listeners.get(port)
        if listener is None:
            listener = self._listeners[port] = _Listener(port)
        listener.streams += 1
        exchange.beat()  # Tells the host that the port is open from now on.
        try:
            if exchange.query.get("hold") == "1":
                await exchange.reader.read(1)
                return
            connection = await _first(listener, exchange)
            if connection is not None:
                await _join(connection, exchange)
        finally:
            listener.streams -= 1
            if not listener.streams:
                del self._listeners[port]
                listener.close()


class _Listener:
    """One port of loopback."""

    def __init__(self, port: int) -> None:
        self.streams = 0
        self._turn = asyncio.Lock()  # A loop lets one task alone wait for a socket.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", port))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                taken = f"a program of the machine listens on port {port} itself"
                raise Refusal(409, "port_taken", taken) from None
            raise

    async def accept(self) -> socket.socket:
        async with self._turn:
            return (await asyncio.get_running_loop().sock_accept(self._socket))[0]

    def close(self) -> None:
        self._socket.close()


async def _first(listener: _Listener, exchange: Exchange) -> socket.socket | None:
    """Return the next program's connection; None when the host leaves before there is one."""
    accepting = asyncio.ensure_future(listener.accept())
    leaving = asyncio.ensure_future(exchange.reader.read(1))
    try:
        await asyncio.wait((accepting, leaving), return_when=asyncio.FIRST_COMPLETED)
        return accepting.result() if accepting.done() else None
    finally:
        accepting.cancel()
        leaving.cancel()
        await asyncio.gather(accepting, leaving, return_exceptions=True)


async def _join(connection: socket.socket, exchange: Exchange) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await exchange.switch()
        await asyncio.gather(pump(exchange.reader, writer), pump(reader, exchange.writer))
    finally:
        writer.close()
