"""Tunnels: to a server that the machine's user has, and to nothing by a detour."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from cloche.core.errors import (
    BadRequest,
    ClocheError,
    FileRefused,
    NoSuchFile,
    PathRefused,
    PortClosed,
)
from cloche.sandbox.sandbox import Sandbox

from . import probe

SERVE = """
import os, socket, threading, time
os.makedirs("/dev/shm/outside", exist_ok=True)
servers = {"/workspace/inside.sock": b"inside", "/dev/shm/outside/out.sock": b"outside"}
for path, word in servers.items():
    server = socket.socket(socket.AF_UNIX)
    server.bind(path), server.listen()
    def serve(server=server, word=word):
        while True:
            client, _ = server.accept()
            client.sendall(word)
            client.close()
    threading.Thread(target=serve, daemon=True).start()
full = socket.socket(socket.AF_UNIX)
full.bind("/workspace/full.sock"), full.listen(0)
waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
for client in waiting:
    client.setblocking(False)
    try:
        client.connect("/workspace/full.sock")
    except OSError:
        break
os.symlink("/workspace/inside.sock", "/workspace/near")
os.symlink("/dev/shm/outside/out.sock", "/workspace/far")
os.symlink("/dev/shm/outside", "/workspace/folder")
os.symlink("/proc/self/fd/3", "/workspace/channel")
print("ready", flush=True)
time.sleep(120)
"""


@pytest.fixture(scope="module", autouse=True)
async def _servers(sandbox: Sandbox) -> AsyncIterator[None]:
    process = await sandbox.start(["/usr/bin/python3", "-c", SERVE])
    async with contextlib.aclosing(process.output()) as chunks:
        assert (await anext(chunks)).data == b"ready\n"
    yield
    await process.kill()


@pytest.mark.parametrize("path", ["/workspace/inside.sock", "/workspace/near", "inside.sock"])
async def test_a_socket_inside_is_reached(sandbox: Sandbox, path: str) -> None:
    """The positive control: the servers are there, and links that stay inside are followed."""
    absolute = path if path.startswith("/") else f"/workspace/{path}"
    reader, writer = await sandbox.tunnel(unix=absolute)

    assert await asyncio.wait_for(reader.read(), 5) == b"inside"
    writer.close()


@pytest.mark.parametrize(
    "path",
    [
        "/dev/shm/outside/out.sock",
        "/workspace/far",
        "/workspace/folder/out.sock",
        "/workspace/../dev/shm/outside/out.sock",
        "/workspace/channel",
        "/proc/self/fd/3",
        "/run/cloche/guest.sock",
    ],
)
async def test_no_detour_leads_to_a_socket_outside(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(PathRefused):
        await sandbox.tunnel(unix=path)


@pytest.mark.parametrize(
    ("path", "refusal"),
    [
        ("/workspace", FileRefused | PortClosed),
        ("/etc/passwd", PathRefused),
        ("/tmp/no", NoSuchFile),
    ],
)
async def test_what_is_no_server_is_refused(
    sandbox: Sandbox, path: str, refusal: type[ClocheError]
) -> None:
    outcome = await probe.outcome(sandbox.tunnel(unix=path))

    assert isinstance(outcome, refusal), outcome


@pytest.mark.parametrize("path", ["", "\0abstract", "/workspace/\0", "relative", "x" * 9000])
async def test_a_malformed_path_is_refused(sandbox: Sandbox, path: str) -> None:
    outcome = await probe.outcome(sandbox.tunnel(unix=path))

    assert isinstance(outcome, BadRequest | NoSuchFile | PathRefused | FileRefused), outcome
    assert await probe.answers(sandbox)


async def test_a_server_that_never_accepts_does_not_hold_the_guest(sandbox: Sandbox) -> None:
    """More waiting tunnels than the guest has threads for files, and a file call behind them."""
    tunnels = [asyncio.ensure_future(sandbox.tunnel(unix="/workspace/full.sock")) for _ in range(8)]
    await asyncio.sleep(0.2)

    async with asyncio.timeout(12):
        assert (await sandbox.files.list("/workspace")).entries
    for tunnel in tunnels:
        tunnel.cancel()
    await asyncio.gather(*tunnels, return_exceptions=True)
    assert await probe.answers(sandbox)


FLOOD = """
import socket
server = socket.create_server(("127.0.0.1", 4567))
print("ready", flush=True)
client, _ = server.accept()
while True:
    client.sendall(bytes(1 << 20))
"""


async def test_a_tunnel_that_floods_waits_for_its_reader(sandbox: Sandbox) -> None:
    flood = await sandbox.start(["python3", "-c", FLOOD])
    async with contextlib.aclosing(flood.output()) as chunks:
        await anext(chunks)
    reader, writer = await sandbox.tunnel(port=4567)
    await asyncio.sleep(1)
    used = (await sandbox.usage()).memory_bytes
    held = len(reader._buffer)  # type: ignore[attr-defined]
    writer.close()
    await flood.kill()

    assert held < 1 << 20, "the host buffers what nobody reads"
    assert used < 128 << 20, "the guest buffers what nobody reads"
