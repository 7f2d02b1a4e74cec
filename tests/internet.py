"""An internet of our own: two network namespaces, joined by a wire that leads nowhere else.

Servers listen in the one, with addresses as on the real internet and as in an operator's
own network; the proxy dials from the other. No packet can leave, for there is no way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from cloche.core.machine import ByteStream
from cloche.sandbox.dialling import BUFFER_BYTES

PUBLIC = "93.184.77.10"
OTHER = "93.184.77.11"
PUBLIC_V6 = "2606:4700:77::10"
PRIVATE = "10.77.0.10"
METADATA = "169.254.169.254"
OWN = "93.184.77.1"
"""The dialling side's own address."""

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Internet:
    """Both namespaces, by their names."""

    def __init__(self) -> None:
        name = f"cloche-{secrets.token_hex(4)}"
        self._near, self._far = f"{name}-near", f"{name}-far"
        self.dialled: list[str] = []

    def set_up(self) -> None:
        for space in (self._near, self._far):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", self._near, "link", "add", "wire", "type", "veth", "peer", "wire", "netns",
            self._far)  # fmt: skip
        _ip("-n", self._near, "addr", "add", f"{OWN}/24", "dev", "wire")
        _ip("-n", self._near, "addr", "add", "2606:4700:77::1/64", "dev", "wire", "nodad")
        for address in (f"{PUBLIC}/24", f"{OTHER}/24", f"{PRIVATE}/32", f"{METADATA}/32"):
            _ip("-n", self._far, "addr", "add", address, "dev", "wire")
        _ip("-n", self._far, "addr", "add", f"{PUBLIC_V6}/64", "dev", "wire", "nodad")
        for space in (self._near, self._far):
            _ip("-n", space, "link", "set", "wire", "up")
        _ip("-n", self._near, "route", "add", "default", "via", PUBLIC)

    def tear_down(self) -> None:
        for space in (self._near, self._far):
            _ip("netns", "del", space)

    def listen(self, address: str, port: int, *, near: bool = False) -> socket.socket:
        """Make a listening socket on the internet, or on the host that dials."""

        def make() -> socket.socket:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(1024)
            return listener

        return _inside(self._near if near else self._far, make)

    async def connect(self, address: str, port: int) -> ByteStream:
        """Dial as the proxy does, from within."""
        self.dialled.append(address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        client = _inside(self._near, lambda: socket.socket(family, socket.SOCK_STREAM))
        client.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(client, (address, port))
        except BaseException:
            client.close()
            raise
        return await asyncio.open_connection(sock=client, limit=BUFFER_BYTES)

    @contextlib.asynccontextmanager
    async def serving(
        self, handler: Handler, address: str, port: int, *, near: bool = False
    ) -> AsyncIterator[None]:
        server = await asyncio.start_server(
            handler, sock=self.listen(address, port, near=near), backlog=1024
        )
        try:
            yield
        finally:
            server.close()


class Names:
    """A resolver that answers from a table; a list of answers is gone through, one a question."""

    def __init__(self, table: Mapping[str, Sequence[str] | list[Sequence[str]]]) -> None:
        self.table = dict(table)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.table:
            raise OSError(f"no such name: {host}")
        found = self.table[host]
        if isinstance(found, list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found


@contextlib.contextmanager
def internet() -> Iterator[Internet]:
    made = Internet()
    try:
        made.set_up()
        yield made
    finally:
        made.tear_down()


def _inside(space: str, make: Callable[[], T]) -> T:
    """Make something in a namespace, on a thread that ends there."""
    made: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        descriptor = os.open(Path("/run/netns") / space, os.O_RDONLY)
        try:
            if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            made.append(make())
        except BaseException as error:
            failed.append(error)
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
