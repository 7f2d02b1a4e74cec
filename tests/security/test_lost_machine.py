"""The end of a guest: told as what it is, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from cloche.backends.container.cgroups import hierarchies
from cloche.backends.container.record import start_time
from cloche.core.errors import GuestMisbehaved, SandboxLost
from cloche.sandbox import client
from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox


def _kill_guest(sandbox: Sandbox) -> None:
    os.kill(probe.first_pid(sandbox), signal.SIGKILL)


def _left(sandbox: Sandbox, data: Path) -> list[str]:
    """Return what is left of a machine on the host."""
    folder = data / "machines" / sandbox.id
    found = [str(folder)] if folder.exists() else []
    found += [
        str(cgroup)
        for root in hierarchies().values()
        if (cgroup := root / "cloche" / sandbox.id).exists()
    ]
    found += [
        str(backing)
        for backing in Path("/sys/block").glob("loop*/loop/backing_file")
        if sandbox.id in backing.read_text()
    ]
    found += [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if sandbox.id in line
    ]
    return found


async def test_calls_in_flight_end_as_lost(make_sandbox: MakeSandbox, data: Path) -> None:
    sandbox = await make_sandbox()
    process = await sandbox.start(["sleep", "60"], stdin=True)

    async def follow() -> None:
        async for _ in process.output():
            pass

    async def watch() -> None:
        async for _ in sandbox.files.watch():
            pass

    calls = {
        "exec": sandbox.exec(["sleep", "60"], timeout_s=60),
        "run_code": sandbox.run_code("python", "import time; time.sleep(60)"),
        "output": follow(),
        "wait": process.wait(),
        "write": process.write(bytes(1 << 20)),
        "watch": watch(),
    }
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    await asyncio.sleep(1)
    assert [name for name, task in tasks.items() if task.done()] == [], "not in flight"
    began = time.monotonic()

    _kill_guest(sandbox)
    await asyncio.wait(tasks.values(), timeout=10)

    assert time.monotonic() - began < 5
    outcomes = {name: type(task.exception()) for name, task in tasks.items()}
    assert outcomes == dict.fromkeys(calls, SandboxLost)
    await sandbox.close()
    assert _left(sandbox, data) == []


async def test_calls_after_the_end_are_lost_at_once(make_sandbox: MakeSandbox, data: Path) -> None:
    sandbox = await make_sandbox()
    process = await sandbox.start(["sleep", "60"])
    pids = probe.pids(sandbox)
    _kill_guest(sandbox)
    while await sandbox.machine.alive():
        await asyncio.sleep(0.01)

    for call in (
        sandbox.hello(),
        sandbox.exec(["true"]),
        sandbox.start(["true"]),
        sandbox.processes(),
        sandbox.tunnel(port=80),
        sandbox.files.read("x"),
        sandbox.files.write("x", b""),
        process.kill(),
        process.status(),
        process.wait(),
    ):
        with pytest.raises(SandboxLost):
            await call
    await sandbox.close()
    await sandbox.close()

    assert _left(sandbox, data) == []
    assert not [pid for pid in pids if start_time(pid)], "a process outlived it"


async def test_a_guest_that_stands_still_is_told_of_and_destroyed(
    make_sandbox: MakeSandbox, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await make_sandbox()
    monkeypatch.setattr(client, "ANSWER_S", 0.5)
    os.kill(probe.first_pid(sandbox), signal.SIGSTOP)
    began = time.monotonic()

    with pytest.raises(GuestMisbehaved):
        await sandbox.files.list()
    await sandbox.close()

    assert time.monotonic() - began < 5
    assert _left(sandbox, data) == []
