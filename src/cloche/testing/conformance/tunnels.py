"""Tunnels: byte streams to servers inside the machine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import pytest

from cloche.core.errors import BadRequest, NoSuchFile, PathRefused, PortClosed
from cloche.core.machine import ByteStream
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.conformance.commands import EVERY_BYTE
from cloche.testing.transcript import Transcript

SERVER = """
import hashlib, socket, sys, threading

def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)

def digest(connection):
    total = hashlib.sha256()
    while data := connection.recv(65536):
        total.update(data)
    connection.sendall(total.hexdigest().encode())
    connection.close()

def speak_first(connection):
    connection.sendall(b"welcome" * 200_000)
    connection.close()

family, address, manner = sys.argv[1:]
server = socket.socket(getattr(socket, family))
server.bind(address if family == "AF_UNIX" else (address, 0))
server.listen(64)
print(0 if family == "AF_UNIX" else server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    threading.Thread(target=globals()[manner], args=(connection,), daemon=True).start()
"""


@contextlib.asynccontextmanager
async def serving(sandbox: Sandbox, family: str, address: str, manner: str) -> AsyncIterator[int]:
    """Run a server in the machine; yield its port."""
    process = await sandbox.start(["python3", "-c", SERVER, family, address, manner])
    async with Transcript(process) as transcript:
        await transcript.until(b"\n")
        try:
            yield int(transcript.stdout)
        finally:
            await process.kill()


@contextlib.asynccontextmanager
async def closing(stream: ByteStream) -> AsyncIterator[ByteStream]:
    try:
        yield stream
    finally:
        stream[1].close()
        with contextlib.suppress(ConnectionError):
            await stream[1].wait_closed()


async def _ask(stream: ByteStream, data: bytes) -> bytes:
    """Send `data`, say that there is no more, and read the answer to its end."""
    reader, writer = stream

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    _, answer = await asyncio.gather(send(), reader.read())
    return answer


@pytest.mark.asyncio(loop_scope="session")
class TestTunnels:
    """What `tunnel` reaches."""

    @pytest.mark.parametrize(
        ("family", "address"),
        [("AF_INET", "127.0.0.1"), ("AF_INET", "0.0.0.0"), ("AF_INET6", "::1"), ("AF_INET6", "::")],  # noqa: S104
    )
    async def test_a_tcp_server_is_reached_whichever_loopback_it_is_on(
        self, sandbox: Sandbox, family: str, address: str
    ) -> None:
        async with (
            serving(sandbox, family, address, "echo") as port,
            closing(await sandbox.tunnel(port=port)) as stream,
        ):
            assert await _ask(stream, EVERY_BYTE) == EVERY_BYTE

    async def test_a_unix_socket_is_reached(self, sandbox: Sandbox, folder: str) -> None:
        path = f"{folder}/socket"
        async with (
            serving(sandbox, "AF_UNIX", path, "echo"),
            closing(await sandbox.tunnel(unix=path)) as stream,
        ):
            assert await _ask(stream, EVERY_BYTE) == EVERY_BYTE

    async def test_megabytes_go_both_ways_at_once(self, sandbox: Sandbox) -> None:
        data = hashlib.shake_128(b"tunnel").digest(8_000_000)
        async with (
            serving(sandbox, "AF_INET", "127.0.0.1", "echo") as port,
            closing(await sandbox.tunnel(port=port)) as stream,
        ):
            answer = await _ask(stream, data)

        assert hashlib.sha256(answer).digest() == hashlib.sha256(data).digest(), len(answer)

    async def test_a_half_closed_tunnel_still_brings_the_answer(self, sandbox: Sandbox) -> None:
        data = b"x" * 1_000_000
        async with (
            serving(sandbox, "AF_INET", "127.0.0.1", "digest") as port,
            closing(await sandbox.tunnel(port=port)) as stream,
        ):
            answer = await _ask(stream, data)

        assert answer.decode() == hashlib.sha256(data).hexdigest()

    async def test_a_server_that_speaks_first_is_heard_from_its_first_byte(
        self, sandbox: Sandbox
    ) -> None:
        async with serving(sandbox, "AF_INET", "127.0.0.1", "speak_first") as port:
            for _ in range(5):
                async with closing(await sandbox.tunnel(port=port)) as (reader, _):
                    assert await reader.read(-1) == b"welcome" * 200_000

    async def test_many_tunnels_are_open_at_once(self, sandbox: Sandbox) -> None:
        async with serving(sandbox, "AF_INET", "127.0.0.1", "echo") as port:

            async def ask(number: int) -> bytes:
                async with closing(await sandbox.tunnel(port=port)) as stream:
                    return await _ask(stream, b"%d" % number * 10_000)

            answers = await asyncio.gather(*(ask(number) for number in range(30)))

        assert answers == [b"%d" % number * 10_000 for number in range(30)]

    async def test_a_port_where_nobody_listens_is_told_as_closed(self, sandbox: Sandbox) -> None:
        with pytest.raises(PortClosed):
            await sandbox.tunnel(port=1)

    async def test_a_socket_where_nobody_listens_is_told_as_closed(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        path = f"{folder}/socket"
        bind = f"import socket; socket.socket(socket.AF_UNIX).bind({path!r})"
        await sandbox.exec(["python3", "-c", bind])

        with pytest.raises(PortClosed):
            await sandbox.tunnel(unix=path)
        with pytest.raises(NoSuchFile):
            await sandbox.tunnel(unix=f"{folder}/nothing")

    async def test_what_is_no_socket_is_told_as_closed(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/file", b"")

        with pytest.raises(PortClosed):
            await sandbox.tunnel(unix=f"{folder}/file")

    @pytest.mark.parametrize("port", [0, -1, 65536, 1 << 40])
    async def test_a_port_of_no_sense_is_refused(self, sandbox: Sandbox, port: int) -> None:
        with pytest.raises(BadRequest):
            await sandbox.tunnel(port=port)

    async def test_a_tunnel_leads_to_one_place(self, sandbox: Sandbox) -> None:
        with pytest.raises(BadRequest):
            await sandbox.tunnel()
        with pytest.raises(BadRequest):
            await sandbox.tunnel(port=80, unix="/workspace/socket")

    @pytest.mark.parametrize("path", ["socket", "", "a\0b", "\ud83e"])
    async def test_a_socket_has_an_absolute_path(self, sandbox: Sandbox, path: str) -> None:
        with pytest.raises(BadRequest):
            await sandbox.tunnel(unix=path)

    async def test_no_socket_outside_the_users_folders_is_reached(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        async with serving(sandbox, "AF_UNIX", "/var/tmp/socket", "echo"):
            await sandbox.exec(["ln", "-s", "/var/tmp/socket", "link"], cwd=folder)

            for path in ("/var/tmp/socket", f"{folder}/link"):
                with pytest.raises(PathRefused):
                    await sandbox.tunnel(unix=path)
