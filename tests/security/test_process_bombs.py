"""Processes: as many as the machine is given, for as long as the command is given."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from cloche.backends.container.cgroups import hierarchies
from cloche.core.errors import CommandTimeout, MachineFull
from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

DEADLINE_S = 2.0
GRACE_S = 8.0
"""How much later than its deadline a tree may be dead, on a busy host."""

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
DAEMONS = """
import os, signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
THREADS = """
import threading, time
while True:
    try:
        threading.Thread(target=time.sleep, args=(60,)).start()
    except RuntimeError:
        time.sleep(0.05)
"""
COMETS = """
#include <signal.h>
#include <unistd.h>
/* Each process lives only to fork the next, so that no list of them is ever right. */
int main(void) {
    signal(SIGCHLD, SIG_IGN);
    for (int each = 0; each < 100; each++)
        if (fork() == 0)
            for (;;) {
                pid_t next = fork();
                if (next > 0) _exit(0);
                if (next == 0) setsid();
            }
    pause();
}
"""


class Peak:
    """The most processes that the machine had at once, as the host counts them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.processes = 0
        self._sandbox = sandbox

    async def watch(self) -> None:
        while True:
            self.processes = max(self.processes, (await self._sandbox.usage()).processes)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("bomb", ["fork bomb", "shell bomb", "daemons", "threads", "comets"])
async def test_a_bomb_is_bounded_and_dies_with_its_deadline(
    make_sandbox: MakeSandbox, bomb: str
) -> None:
    sandbox = await make_sandbox(pids=256)
    argv = {
        "fork bomb": ["python3", "-c", FORK_BOMB],
        "shell bomb": ["bash", "-c", ":(){ :|:& };:; sleep 60"],
        "daemons": ["python3", "-c", DAEMONS],
        "threads": ["python3", "-c", THREADS],
        "comets": [await probe.build(sandbox, COMETS, "comets")],
    }[bomb]
    peak = Peak(sandbox)
    watching = asyncio.create_task(peak.watch())
    began = time.monotonic()

    with pytest.raises(CommandTimeout):
        await sandbox.exec(argv, timeout_s=DEADLINE_S)

    took_s = time.monotonic() - began
    watching.cancel()
    survivors = probe.user_pids(sandbox)
    assert peak.processes > 20, "the bomb did not go off"
    assert peak.processes <= sandbox.spec.pids
    assert took_s < DEADLINE_S + GRACE_S
    assert survivors == set()
    assert await probe.answers(sandbox)


async def test_a_bomb_that_nobody_waits_for_can_be_ended(make_sandbox: MakeSandbox) -> None:
    """While it burns the guest answers, and with the host's order it dies."""
    sandbox = await make_sandbox(pids=256)
    bomb = await sandbox.start(["python3", "-c", FORK_BOMB])
    for _ in range(200):
        if (await sandbox.usage()).processes > 200:
            break
        await asyncio.sleep(0.02)
    burning = (await sandbox.usage()).processes

    with contextlib.suppress(MachineFull):
        await sandbox.exec(["true"], timeout_s=10)
    listed = await sandbox.processes()
    await bomb.kill()

    assert burning > 200, "the bomb did not go off"
    assert bomb.id in {status.id for status in listed}
    assert await probe.answers(sandbox)
    assert (await sandbox.usage()).processes < 20


TRACER = """
victim = given["pid"]
attached = libc.ptrace(16, victim, 0, 0)
os.waitpid(victim, 0x40000000)
libc.ptrace(7, victim, 0, 0)
answer(attached)
time.sleep(60)
"""


async def test_a_dead_process_that_a_tracer_will_not_bury_holds_nothing_up(
    make_sandbox: MakeSandbox,
) -> None:
    """Its parent never hears of its death, so "no child is left" never comes true."""
    sandbox = await make_sandbox()
    victim = await sandbox.start(["sleep", "60"])
    code = probe.PRELUDE + TRACER
    tracer = await sandbox.start(["/usr/bin/python3", "-I", "-c", code, f'{{"pid": {victim.pid}}}'])
    async with contextlib.aclosing(tracer.output()) as chunks:
        assert (await anext(chunks)).data == b"0\n", "the tracer did not attach"
    began = time.monotonic()

    await victim.kill()

    assert time.monotonic() - began < 5
    assert await probe.answers(sandbox)


async def test_a_busy_machine_gets_its_processors_and_no_more(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox(vcpus=1)
    hogs = await sandbox.start(
        ["bash", "-c", "for i in 1 2 3 4; do (while :; do :; done) & done; wait"]
    )
    await asyncio.sleep(0.3)
    began, used_s = time.monotonic(), (await sandbox.usage()).cpu_s

    await asyncio.sleep(2)

    share = ((await sandbox.usage()).cpu_s - used_s) / (time.monotonic() - began)
    assert await probe.answers(sandbox), "the guest starves beside the hogs"
    await hogs.kill()
    assert 0.2 < share < 1.25, f"{share:.2f} processors for a machine of one"


async def test_the_host_holds_the_bound_that_the_guest_sets_for_itself(
    make_sandbox: MakeSandbox,
) -> None:
    """The user's limit is the guest's to set; should it be taken over, the cgroup's stands."""
    sandbox = await make_sandbox(pids=256)
    root = hierarchies().get("pids") or hierarchies()[""]

    assert (root / "cloche" / sandbox.id / "pids.max").read_text().strip() == "256"


async def test_no_process_outlives_its_machine(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox()
    await sandbox.start(["python3", "-c", DAEMONS])
    await sandbox.start(["bash", "-c", "kill -STOP $$"])
    await asyncio.sleep(0.5)
    running = len(probe.user_pids(sandbox))

    await sandbox.close()

    assert running > 20
    assert probe.pids(sandbox) == set()
