"""A byte stream to a server inside the machine: a TCP port on loopback, or a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from cloche.guest import paths
from cloche.guest.http import READ_BYTES, Exchange, Refusal, bad_request, number

CONNECT_S = 5.0


async def open_tunnel(exchange: Exchange) -> None:
    if "unix" in exchange.query:
        connection = await paths.as_user(_connect_unix, exchange.query["unix"])
        reader, writer = await asyncio.open_unix_connection(sock=connection)
    elif "port" in exchange.query:
        reader, writer = await _connect_tcp(number(exchange, "port", 0, 1, 65535))
    else:
        raise bad_request("a tunnel leads to a port or to a unix socket")
    try:
        await exchange.switch()
        await asyncio.gather(pump(exchange.reader, writer), pump(reader, exchange.writer))
    finally:
        writer.close()


async def _connect_tcp(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(host, port)
    raise Refusal(409, "port_closed", f"nobody listens on port {port} of the machine's loopback")


def _connect_unix(path: str) -> socket.socket:
    descriptor = paths.open_path(path, os.O_PATH)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_S)
    try:
        # By the descriptor, not the name, so that what was checked is what is dialled.
        connection.connect(f"/proc/self/fd/{descriptor}")
    except (ConnectionError, TimeoutError):
        connection.close()
        raise Refusal(409, "port_closed", f"nobody listens at {path!r}") from None
    except OSError:
        connection.close()
        raise
    finally:
        os.close(descriptor)
    connection.setblocking(False)
    return connection


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until there are no more; a connection that breaks breaks the other."""
    try:
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except ConnectionError:
        writer.transport.abort()
