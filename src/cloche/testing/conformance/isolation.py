"""Isolation: two machines on one host see nothing of each other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cloche.core.errors import PortClosed
from cloche.core.image import Image
from cloche.core.machine import Backend
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.conformance.limits import mark, survivors
from cloche.testing.conformance.tunnels import serving
from cloche.testing.transcript import Transcript

ABSTRACT = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
if sys.argv[1] == "listen":
    s.bind("\\0" + sys.argv[2]); s.listen(); print("up", flush=True); s.accept()
try:
    s.connect("\\0" + sys.argv[2]); print("reached")
except OSError as error:
    print("refused", error.strerror)
"""
SHARED_MEMORY = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
key, flags = int(sys.argv[1]), int(sys.argv[2], 8)
print("found" if libc.shmget(key, 4096, flags) >= 0 else "none", flush=True)
"""


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def neighbour(backend: Backend, image: Image) -> AsyncIterator[Sandbox]:
    """A second machine on the same host."""
    async with await Sandbox.start_on(backend, SandboxSpec(), image) as started:
        yield started


@pytest.mark.asyncio(loop_scope="session")
class TestIsolation:
    """What one machine does, the other cannot notice."""

    async def test_machines_have_ids_of_their_own(
        self, sandbox: Sandbox, neighbour: Sandbox
    ) -> None:
        assert sandbox.id != neighbour.id

    async def test_processes_are_not_seen(self, sandbox: Sandbox, neighbour: Sandbox) -> None:
        marked = mark()
        process = await sandbox.start(["sleep", marked])

        assert marked in await survivors(sandbox, marked)
        assert await survivors(neighbour, marked) == ""
        assert process.id not in [status.id for status in await neighbour.processes()]
        await process.kill()

    async def test_processes_of_the_host_are_not_seen(self, sandbox: Sandbox) -> None:
        told = await sandbox.exec(["ps", "-eo", "pid,args", "--no-headers"])

        assert len(told.stdout.splitlines()) < 10, told.stdout
        assert "pytest" not in told.stdout

    @pytest.mark.parametrize("root", ["/workspace", "/home/user", "/tmp", "/dev/shm", "/var/tmp"])
    async def test_files_are_not_seen(
        self, sandbox: Sandbox, neighbour: Sandbox, root: str
    ) -> None:
        await sandbox.exec(["sh", "-c", f"echo secret > {root}/secret"])

        assert (await sandbox.exec(["cat", f"{root}/secret"])).stdout == "secret\n"
        assert (await neighbour.exec(["cat", f"{root}/secret"])).exit_code == 1

    async def test_loopback_is_not_shared(self, sandbox: Sandbox, neighbour: Sandbox) -> None:
        async with serving(sandbox, "AF_INET", "127.0.0.1", "echo") as port:
            with pytest.raises(PortClosed):
                await neighbour.tunnel(port=port)
            code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
            refused = await neighbour.exec(["python3", "-c", code])

        assert "ConnectionRefusedError" in refused.stderr, refused

    async def test_abstract_sockets_are_not_shared(
        self, sandbox: Sandbox, neighbour: Sandbox
    ) -> None:
        listener = await sandbox.start(["python3", "-c", ABSTRACT, "listen", "meeting-point"])
        async with Transcript(listener) as transcript:
            await transcript.until(b"up")

            other = await neighbour.exec(["python3", "-c", ABSTRACT, "dial", "meeting-point"])
            own = await sandbox.exec(["python3", "-c", ABSTRACT, "dial", "meeting-point"])

        await listener.kill()
        assert other.stdout == "refused Connection refused\n", other
        assert own.stdout == "reached\n", "the check itself works"

    async def test_shared_memory_is_not_shared(self, sandbox: Sandbox, neighbour: Sandbox) -> None:
        made = await sandbox.exec(["python3", "-c", SHARED_MEMORY, "4711", "1666"])
        own = await sandbox.exec(["python3", "-c", SHARED_MEMORY, "4711", "0"])
        other = await neighbour.exec(["python3", "-c", SHARED_MEMORY, "4711", "0"])

        assert (made.stdout, own.stdout, other.stdout) == ("found\n", "found\n", "none\n")

    async def test_a_busy_neighbour_does_not_stop_a_machine(
        self, sandbox: Sandbox, neighbour: Sandbox
    ) -> None:
        hog = await neighbour.start(
            ["sh", "-c", "for n in 1 2 3 4; do yes > /dev/null & done; wait"]
        )
        try:
            assert (await sandbox.exec(["echo", "fine"])).stdout == "fine\n"
        finally:
            await hog.kill()
