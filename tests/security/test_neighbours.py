"""Other machines and the host: what one machine uses up, the others still have.

The kernel counts some things for each user, and charges what a user namespace
holds to whoever made it. Were that the host's root, one machine could take the
host's and every other machine's share. Each attack lasts a moment and is undone.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator

import pytest

from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

TAKE = {
    "inotify instances": "libc.inotify_init1(0) >= 0",
    "pending signals": "libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(1)) == 0",
    "message queues": "libc.mq_open(b'/q%d' % taken, 0o102, 0o600, None) >= 0",
    "terminals": "os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY) >= 0",
    "asynchronous reads": "libc.syscall(ctypes.c_long(given['io_setup']), 256, "
    "ctypes.byref(ctypes.c_ulong())) == 0",
}
"""How to take one more of each thing; false, or an OSError, when there is no more."""

ONE = {
    "inotify instances": "libc.inotify_init1(0)",
    "pending signals": "libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p()))",
    "message queues": "libc.mq_open(b'/one', 0o102, 0o600, None)",
    "terminals": "os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)",
    "asynchronous reads": "libc.syscall(ctypes.c_long(given['io_setup']), 1, "
    "ctypes.byref(ctypes.c_ulong()))",
}
"""How a bystander takes a single one."""

ASK_ONE = """
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
try:
    result = {one}
except OSError as error:
    result = -error.errno
if given.get("tidy") and result >= 0:
    libc.mq_unlink(b"/one")
answer("ok" if result >= 0 else name_of(-result if result < -1 else ctypes.get_errno()))
"""

MOST = 200_000


@contextlib.asynccontextmanager
async def _greedy(sandbox: Sandbox, thing: str, io_setup: int) -> AsyncIterator[int]:
    """Hold as many of a thing as the machine is given, for the length of a block."""
    code = f"""{probe.PRELUDE}
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
taken = 0
try:
    while taken < {MOST} and ({TAKE[thing]}):
        taken += 1
except OSError:
    pass
print(taken, flush=True)
time.sleep(30)
"""
    given = f'{{"io_setup": {io_setup}}}'
    process = await sandbox.start(["/usr/bin/python3", "-I", "-c", code, given])
    try:
        async with contextlib.aclosing(process.output()) as chunks:
            first = await anext(chunks)
        assert first.stream == "stdout", first.data
        yield int(first.data)
    finally:
        await process.kill()


@pytest.mark.parametrize("thing", TAKE)
async def test_one_machine_cannot_use_up_what_others_need(
    make_sandbox: MakeSandbox, thing: str
) -> None:
    greedy, bystander = await make_sandbox(), await make_sandbox()
    io_setup = (await probe.syscall_numbers(bystander))["io_setup"]
    code = ASK_ONE.format(one=ONE[thing])
    before = await probe.ask_host(code, io_setup=io_setup, tidy=True)

    async with _greedy(greedy, thing, io_setup) as taken:
        neighbour = await probe.ask(bystander, code, io_setup=io_setup)
        host = await probe.ask_host(code, io_setup=io_setup, tidy=True)

    assert before == "ok", f"the host has no {thing} to begin with: {before}"
    assert taken < MOST, f"a machine's {thing} have no bound at all"
    assert host == "ok", f"one machine took {taken} {thing}; the host gets {host}"
    assert neighbour in ("ok", "ENOSYS"), (
        f"one machine took {taken} {thing}; another gets {neighbour}"
    )


async def test_machines_are_different_users_of_the_host(make_sandbox: MakeSandbox) -> None:
    first, second = await make_sandbox(), await make_sandbox()
    ranges = sorted(probe.host_id(sandbox) for sandbox in (first, second))

    assert ranges[1] - ranges[0] >= 65536
    assert ranges[0] > 1 << 30, "the ids are above every range that a host hands out"


async def test_machines_share_no_memory_queue_or_semaphore(make_sandbox: MakeSandbox) -> None:
    first, second = await make_sandbox(), await make_sandbox()
    key = secrets.randbelow(1 << 30) + 1
    code = """
    libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    flags = 0o600 | (0o1000 if given["make"] else 0)
    answer([libc.shmget(given["key"], 4096, flags) >= 0,
            libc.msgget(given["key"], flags) >= 0,
            libc.semget(given["key"], 1, flags) >= 0,
            libc.mq_open(b"/shared", 0o102 if given["make"] else 0o2, 0o600, None) >= 0,
            opens("/dev/shm/shared", os.O_RDWR | (os.O_CREAT if given["make"] else 0)) == "ok"])
    """

    made = await probe.ask(first, code, key=key, make=True)
    again = await probe.ask(first, code, key=key, make=False)
    across = await probe.ask(second, code, key=key, make=False)
    host = await probe.ask_host(code, key=key, make=False)

    assert made == again == [True] * 5, "the probe cannot find even what it made"
    assert across == [False] * 5
    assert host == [False] * 5


async def test_machines_do_not_see_each_others_processes(make_sandbox: MakeSandbox) -> None:
    first, second = await make_sandbox(), await make_sandbox()
    mark = f"mark-{secrets.token_hex(8)}"
    await first.start(["sleep", "60"], env={"MARK": mark})
    look = "grep -l MARK=mark /proc/[0-9]*/environ 2>/dev/null | wc -l"

    assert (await probe.shell(first, look)).startswith("1\n")
    assert (await probe.shell(second, look)).startswith("0\n")
