"""Memory: what a command takes, in whatever shape, is the machine's; only the command dies."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from cloche.core.errors import CommandTimeout, MachineFull
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

MIB = 1 << 20
LIMIT_MIB = 192


@pytest.fixture
async def small(make_sandbox: MakeSandbox) -> Sandbox:
    return await make_sandbox(memory_mib=LIMIT_MIB, pids=256)


@pytest.mark.parametrize(
    "bomb",
    [
        "x = [bytearray(1 << 20) for _ in range(4096)]",
        "import mmap; m = mmap.mmap(-1, 2 << 30)\nfor at in range(0, 2 << 30, 4096): m[at] = 1",
        "import os; f = os.memfd_create('x')\nfor _ in range(2048): os.write(f, bytes(1 << 20))",
    ],
    ids=["heap", "mapping", "memfd"],
)
async def test_a_memory_bomb_kills_its_command_alone(small: Sandbox, bomb: str) -> None:
    bystander = await small.start(["sleep", "60"])

    result = await small.exec(["python3", "-c", bomb], timeout_s=30)

    usage = await small.usage()
    assert result.exit.signal == 9, result
    assert usage.oom_kills >= 1
    assert usage.memory_peak_bytes <= LIMIT_MIB * MIB
    assert (await bystander.status()).exit is None, "a small bystander was killed instead"
    assert await probe.answers(small)


async def test_a_crowd_of_small_processes_does_not_take_the_guest_with_it(small: Sandbox) -> None:
    """Each smaller than the guest, and none in the kernel's eyes a better victim."""
    crowd = """
import mmap, os, time
try:
    open("/proc/self/oom_score_adj", "w").write("0")
except OSError:
    pass
for _ in range(200):
    try:
        if os.fork() == 0:
            held = mmap.mmap(-1, 2 << 20)
            held.write(b"x" * len(held))
            time.sleep(60)
    except OSError:
        time.sleep(0.01)
time.sleep(60)
"""
    with contextlib.suppress(CommandTimeout):
        await small.exec(["python3", "-c", crowd], timeout_s=4)

    assert (await small.usage()).memory_peak_bytes > LIMIT_MIB * MIB * 0.95, "memory never filled"
    assert await small.machine.alive(), "the kernel killed the guest"
    assert await probe.answers(small)


async def test_shared_memory_has_its_own_bound(small: Sandbox) -> None:
    written, word = await probe.ask(
        small,
        """
        written = 0
        try:
            with open("/dev/shm/fill", "wb", buffering=0) as file:
                while written < 1 << 30:
                    written += file.write(bytes(1 << 20))
        except OSError as error:
            word = name_of(error.errno)
        answer([written, word])
        """,
    )
    names = await probe.ask(
        small,
        """
        os.unlink("/dev/shm/fill")
        count = 0
        try:
            while count < 100_000:
                os.close(os.open(f"/dev/shm/{count}", os.O_CREAT | os.O_WRONLY))
                count += 1
        except OSError:
            pass
        answer(count)
        """,
    )

    assert word == "ENOSPC"
    assert written <= LIMIT_MIB * MIB // 2, "shared memory alone fills the machine"
    assert names < 20_000
    assert await probe.answers(small)


async def test_memory_that_outlives_its_process_leaves_the_guest_room(small: Sandbox) -> None:
    """System V segments: nobody's once their maker is dead, and still charged."""
    segments = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
for _ in range(4096):
    segment = libc.shmget(0, 1 << 20, 0o1600)
    address = libc.shmat(segment, None, 0)
    if segment < 0 or address in (None, ctypes.c_void_p(-1).value):
        break
    ctypes.memset(address, 1, 1 << 20)
"""
    for _ in range(3):
        await small.exec(["/usr/bin/python3", "-c", segments], timeout_s=20)

    assert await small.machine.alive(), "the kernel killed the guest"
    await small.exec(["bash", "-c", "ipcrm --all=shm"], timeout_s=20)
    assert await probe.answers(small)


SOCKETS = {
    "tcp": """
server = socket.create_server(("127.0.0.1", 0), backlog=4096)
held, queued = [], 0
for _ in range(1000):
    client = socket.create_connection(server.getsockname())
    held += [client, server.accept()[0]]
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    client.setblocking(False)
    try:
        while queued < given["most"]:
            queued += client.send(bytes(65536))
    except OSError:
        pass
""",
    "udp": """
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.setblocking(False)
held, queued = [], 0
while queued < given["most"] and len(held) < 2000:
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    receiver.bind(("127.0.0.1", 0))
    held.append(receiver)
    for _ in range(8):
        attempt(client.sendto, bytes(60000), receiver.getsockname())
        queued += 60000
""",
}


@pytest.mark.parametrize("kind", SOCKETS)
async def test_what_waits_in_sockets_is_the_machines_too(small: Sandbox, kind: str) -> None:
    """On cgroup v1 the kernel keeps a separate account of it, without a limit by default."""
    before = _socket_bytes(kind)
    code = f"{probe.PRELUDE}{SOCKETS[kind]}\nanswer([len(held), queued])\ntime.sleep(30)"
    most = 3 * LIMIT_MIB * MIB
    process = await small.start(["/usr/bin/python3", "-I", "-c", code, f'{{"most": {most}}}'])
    said = await asyncio.wait_for(_first_words(process), 60)

    taken = _socket_bytes(kind) - before
    await process.kill()

    assert taken < LIMIT_MIB * MIB, (
        f"a machine of {LIMIT_MIB} MiB holds {taken >> 20} MiB in {kind} sockets ({said!r})"
    )
    assert await probe.answers(small)


async def test_a_machine_without_memory_refuses_and_recovers(small: Sandbox) -> None:
    """Held, not grown: the guest must answer, if only to say that there is no room."""
    hold = "import mmap, time; m = mmap.mmap(-1, 140 << 20); m.write(b'x' * len(m)); time.sleep(60)"
    process = await small.start(["python3", "-c", hold])
    for _ in range(100):
        if (await small.usage()).memory_bytes > 140 * MIB:
            break
        await asyncio.sleep(0.05)

    with contextlib.suppress(MachineFull):
        await small.exec(["python3", "-c", "x = bytearray(100 << 20)"], timeout_s=20)
    await process.kill()

    assert await small.machine.alive()
    assert await probe.answers(small)


async def _first_words(process: Process) -> bytes:
    async for chunk in process.output():
        return chunk.data
    return b"it died"


def _socket_bytes(kind: str) -> int:
    """Return what the sockets of the whole host hold."""
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        if line.lower().startswith(f"{kind}:"):
            words = line.split()
            return int(words[words.index("mem") + 1]) * 4096
    return 0
