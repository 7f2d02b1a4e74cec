"""Bounds: what happens to a command, and all it started, when one is reached."""

from __future__ import annotations

import asyncio
import io
import random
import tarfile
import time

import pytest

from cloche.core.errors import (
    BadRequest,
    CommandTimeout,
    MachineFull,
    OutputTooLarge,
)
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.conformance.fixtures import NewSandbox
from cloche.testing.transcript import eventually

DAEMON = """
import os, sys, time
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
os.chdir("/")
for fd in range(3):
    os.close(fd)
time.sleep(float(sys.argv[1]))
"""
"""Loses its parent, its session, its folder and its files, as daemons do."""

STORM = """
sleeping=$1
storm() {
    (($1)) && { storm $(($1 - 1)) & storm $(($1 - 1)) & }
    sleep "$sleeping"
}
storm 12
"""
"""Doubles twelve times: enough to fill any machine here, and no more, should nothing stop it."""


def mark() -> str:
    """Return a number of seconds that no other process sleeps for."""
    return f"{random.randrange(10**8, 10**9)}"  # noqa: S311 - a name, not a secret


async def survivors(sandbox: Sandbox, marked: str) -> str:
    """List the processes whose arguments hold `marked`."""
    return (await sandbox.exec(["pgrep", "--list-full", "--full", marked])).stdout


@pytest.mark.asyncio(loop_scope="session")
class TestTimeouts:
    """A command that takes too long is dead, with everything that came of it."""

    async def test_a_timeout_keeps_what_was_said_until_then(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        with pytest.raises(CommandTimeout) as caught:
            await sandbox.exec(
                ["sh", "-c", "echo out; echo err >&2; sleep 1000"], timeout_s=0.5 * time_scale
            )

        assert (caught.value.stdout, caught.value.stderr) == (b"out\n", b"err\n")

    async def test_a_timeout_comes_on_time(self, sandbox: Sandbox, time_scale: float) -> None:
        began = time.monotonic()

        with pytest.raises(CommandTimeout):
            await sandbox.exec(["sleep", "1000"], timeout_s=0.5)

        took_s = time.monotonic() - began
        assert 0.45 < took_s < 5 * time_scale, f"{took_s:.2f} s"

    @pytest.mark.parametrize(
        ("kind", "script"),
        [
            ("child", "sleep {mark} & wait"),
            ("grandchild", "sh -c 'sleep {mark} & wait' & wait"),
            ("own session", "setsid sleep {mark} & wait; sleep 1000"),
            ("nohup", "nohup sleep {mark} >/dev/null 2>&1 & sleep 1000"),
            ("deaf to signals", "trap '' TERM INT HUP; sh -c 'sleep {mark}' & wait"),
            ("stopped", "sleep {mark} & kill -STOP $!; sleep 1000"),
            ("parentless", "(sleep {mark} &); sleep 1000"),
            ("daemon", 'python3 -c "$DAEMON" {mark}; sleep 1000'),
        ],
        ids=lambda value: value if " " not in value or len(value) < 20 else "",
    )
    async def test_a_timeout_kills_the_whole_process_tree(
        self, sandbox: Sandbox, kind: str, script: str, time_scale: float
    ) -> None:
        marked = mark()

        with pytest.raises(CommandTimeout):
            await sandbox.exec(
                ["sh", "-c", script.format(mark=marked)],
                env={"DAEMON": DAEMON},
                timeout_s=0.7 * time_scale,
            )

        assert await survivors(sandbox, marked) == "", kind

    async def test_a_timeout_ends_a_fork_storm(
        self, new_sandbox: NewSandbox, time_scale: float
    ) -> None:
        sandbox = await new_sandbox(SandboxSpec(pids=200))
        marked = mark()

        with pytest.raises(CommandTimeout):
            await sandbox.exec(["bash", "-c", STORM, "bash", marked], timeout_s=2 * time_scale)

        assert await survivors(sandbox, marked) == ""
        assert (await sandbox.exec(["echo", "calm"])).stdout == "calm\n"

    async def test_a_storm_without_end_is_ended_too(
        self, new_sandbox: NewSandbox, time_scale: float
    ) -> None:
        sandbox = await new_sandbox(SandboxSpec(pids=200))

        with pytest.raises(CommandTimeout):
            await sandbox.exec(
                ["bash", "-c", ":() { : | : & }; : 2>/dev/null; sleep 1000"],
                timeout_s=1.5 * time_scale,
                max_output_bytes=1 << 30,
            )

        left = await sandbox.exec(["pgrep", "--list-full", "."])
        assert len(left.stdout.splitlines()) == 0, left.stdout

    async def test_a_full_process_table_is_told_and_does_not_lock_the_machine_up(
        self, new_sandbox: NewSandbox, time_scale: float
    ) -> None:
        sandbox = await new_sandbox(SandboxSpec(pids=64))
        hog = await sandbox.start(
            ["bash", "-c", "for n in $(seq 100); do sleep 1000 & done 2>/dev/null; wait"]
        )

        async def full() -> bool:
            try:
                answer = await sandbox.exec(["sh", "-c", "(:) && (:)"])
            except MachineFull:
                return True
            return answer.exit_code != 0

        await eventually(full, "the table to fill", timeout_s=10 * time_scale)
        await hog.kill()

        assert (await sandbox.exec(["sh", "-c", "(:) && (:)"])).exit_code == 0

    async def test_a_command_that_is_in_time_may_leave_a_process_behind(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        marked = mark()
        script = f"sleep {marked} & echo done"
        result = await sandbox.exec(["sh", "-c", script], timeout_s=1 * time_scale)
        assert result.stdout == "done\n"

        await asyncio.sleep(1.5 * time_scale)

        assert marked in await survivors(sandbox, marked), "the deadline was the command's"
        [left] = [p for p in await sandbox.processes() if p.argv[2:] == (script,)]
        process = await sandbox.attach(left.id)
        async with asyncio.timeout(5 * time_scale):
            ended = await process.wait()
        assert (ended.code, ended.timed_out) == (0, False), ended
        await process.kill()
        assert await survivors(sandbox, marked) == ""

    async def test_a_started_command_can_have_a_deadline_too(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        process = await sandbox.start(["sleep", "1000"], timeout_s=0.3)

        async with asyncio.timeout(10 * time_scale):
            ended = await process.wait()

        assert ended.timed_out, ended
        assert ended.reason == "timed out"


@pytest.mark.asyncio(loop_scope="session")
class TestCancellation:
    """Who stops waiting for a command does not want it to go on."""

    @pytest.mark.parametrize("delay_s", [0.5, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0])
    async def test_cancelling_exec_kills_the_command(
        self, sandbox: Sandbox, delay_s: float, time_scale: float
    ) -> None:
        marked = mark()
        task = asyncio.create_task(sandbox.exec(["sh", "-c", f"sleep {marked} & wait"]))
        await asyncio.sleep(delay_s)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        await asyncio.sleep(0.2 * time_scale)
        assert await survivors(sandbox, marked) == "", f"cancelled after {delay_s} s"

    async def test_cancelling_run_code_kills_the_code(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        marked = mark()
        task = asyncio.create_task(sandbox.run_code("bash", f"sleep {marked} & wait"))

        async def runs() -> str:
            return await survivors(sandbox, marked)

        await eventually(runs, "the code to run", timeout_s=10 * time_scale)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert await survivors(sandbox, marked) == ""

    async def test_a_caller_who_only_follows_may_leave_without_harm(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sh", "-c", "echo one; read line; echo $line"], stdin=True)
        chunks = process.output()
        assert (await anext(chunks)).data == b"one\n"
        await chunks.aclose()

        await process.write(b"two\n", close=True)

        ended = await process.wait()
        assert ended.code == 0
        assert b"".join([chunk.data async for chunk in process.output()]) == b"one\ntwo\n"


@pytest.mark.asyncio(loop_scope="session")
class TestOutputBounds:
    """A command that says too much is stopped, not listened to for ever."""

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    async def test_too_much_output_ends_the_tree_and_keeps_what_fits(
        self, sandbox: Sandbox, stream: str
    ) -> None:
        marked = mark()
        redirect = ">&2" if stream == "stderr" else ""

        with pytest.raises(OutputTooLarge) as caught:
            await sandbox.exec(
                ["sh", "-c", f"setsid sleep {marked} & yes {redirect}"], max_output_bytes=100_000
            )

        kept = getattr(caught.value, stream)
        assert kept == (b"y\n" * 50_000), f"{len(kept)} bytes, {kept[:20]!r}"
        assert await survivors(sandbox, marked) == ""
        assert await survivors(sandbox, "^yes") == ""

    async def test_output_of_just_the_bound_is_fine(self, sandbox: Sandbox) -> None:
        argv = ["head", "-c", "100000", "/dev/zero"]

        fits = await sandbox.exec(argv, max_output_bytes=100_000)
        assert len(fits.stdout_bytes) == 100_000

        with pytest.raises(OutputTooLarge):
            await sandbox.exec(argv, max_output_bytes=99_999)

    async def test_the_bound_is_on_both_streams_together(self, sandbox: Sandbox) -> None:
        with pytest.raises(OutputTooLarge) as caught:
            await sandbox.exec(
                ["sh", "-c", "head -c 60000 /dev/zero; head -c 60000 /dev/zero >&2"],
                max_output_bytes=100_000,
            )

        kept = len(caught.value.stdout) + len(caught.value.stderr)
        assert kept <= 120_000, kept


@pytest.mark.asyncio(loop_scope="session")
class TestMachineBounds:
    """A machine gets what its spec says, and no more."""

    @pytest.mark.parametrize("name", ["vcpus", "memory_mib", "disk_mib", "pids"])
    @pytest.mark.parametrize("value", [0, -1, 1 << 40])
    async def test_a_machine_of_no_sense_is_refused(self, name: str, value: int) -> None:
        with pytest.raises(BadRequest, match=name):
            SandboxSpec(**{name: value})  # type: ignore[arg-type]

    async def test_memory_beyond_the_bound_ends_the_command_and_not_the_machine(
        self, new_sandbox: NewSandbox
    ) -> None:
        sandbox = await new_sandbox(SandboxSpec(memory_mib=256))

        result = await sandbox.exec(["python3", "-c", "b = b'x' * (1 << 30)"])

        assert result.exit_code != 0, "it was given four times what the machine has"
        assert (await sandbox.exec(["echo", "still here"])).stdout == "still here\n"

    async def test_a_full_disk_is_told_and_the_machine_still_runs_commands(
        self, new_sandbox: NewSandbox
    ) -> None:
        sandbox = await new_sandbox(SandboxSpec(disk_mib=64))
        # In ever smaller parts: a file system may refuse a large one while it has some room.
        fill = "for n in 1M 64k 4k 1k; do dd if=/dev/zero bs=$n >> fill; sync; done"
        filled = await sandbox.exec(["sh", "-c", fill])
        assert "No space left" in filled.stderr, filled

        with pytest.raises(MachineFull):
            await sandbox.files.write("/workspace/file", b"x" * 100_000)
        with pytest.raises(MachineFull):
            await sandbox.files.write("/workspace/large", b"x" * 5_000_000)
        with pytest.raises(MachineFull):
            await sandbox.files.upload(_tar_of_zeros(100_000), "/workspace/folder")
        with pytest.raises(MachineFull):
            await sandbox.run_code("python", "#" * 100_000)
        calm = await sandbox.exec(["echo", "calm"])
        loud = await sandbox.exec(["sh", "-c", "yes | head -c 3000000"])
        assert calm.stdout == "calm\n"
        assert loud.stdout_bytes == b"y\n" * 1_500_000, "what is followed is never lost"

        listing = await sandbox.files.list("/workspace")
        left = [entry.path for entry in listing.entries if entry.kind == "file"]
        assert left == ["/workspace/fill"], "no half file"
        await sandbox.files.remove("/workspace/fill")
        await sandbox.files.write("/workspace/file", b"x" * 100_000)
        assert (await sandbox.files.stat("/workspace/file")).size == 100_000

    async def test_the_host_counts_what_a_machine_uses(self, new_sandbox: NewSandbox) -> None:
        sandbox = await new_sandbox()
        before = await sandbox.usage()

        await sandbox.exec(["python3", "-c", "sum(range(10**7)); b = b'x' * (64 << 20)"])

        after = await sandbox.usage()
        assert after.cpu_s > before.cpu_s + 0.05, (before, after)
        assert after.memory_peak_bytes >= 64 << 20, after
        assert after.processes >= 1, after
        assert after.oom_kills == 0, after


def _tar_of_zeros(size: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("zeros")
        entry.size = size
        tar.addfile(entry, io.BytesIO(bytes(size)))
    return buffer.getvalue()
