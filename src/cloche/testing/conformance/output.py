"""Output: whole, in order, from any byte on, however much of it and whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from pathlib import Path

import pytest

from cloche.core.errors import BadRequest, CommandNotStarted, NoSuchProcess, ProcessExists
from cloche.core.process import Stream
from cloche.core.spec import SandboxSpec
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox, new_process_id
from cloche.testing.conformance.fixtures import NewSandbox
from cloche.testing.conformance.limits import mark, survivors
from cloche.testing.transcript import Transcript, eventually

MIB = 1 << 20
FLOOD = """
import hashlib, sys
for number in range(int(sys.argv[1])):
    sys.stdout.buffer.write(hashlib.shake_128(b"%d" % number).digest(1 << 20))
"""
"""Writes as many MiB as it is told, no two of them alike."""

TICKS = "n=0; while [ $n -lt {ticks} ]; do echo tick $n; n=$((n+1)); sleep {pause}; done"


def flood(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(MIB)


def resident_mib() -> float:
    """Return how much memory this process, the host's end of it all, holds."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmRSS:\s*(\d+) kB", status)[0]) / 1024


async def read_all(process: Process, stdout_from: int = 0) -> bytes:
    """Follow a process to its end and check each chunk's place on the way."""
    collected = bytearray()
    async for chunk in process.output(stdout_from=stdout_from):
        if chunk.stream == "stdout":
            assert chunk.offset == stdout_from + len(collected), (chunk.offset, len(collected))
            assert chunk.lost == 0, chunk.lost
            collected += chunk.data
    return bytes(collected)


@pytest.mark.asyncio(loop_scope="session")
class TestOutput:
    """What a process writes, on its way to whoever follows it."""

    async def test_output_arrives_while_the_process_runs(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sh", "-c", "echo now; read line; echo later"], stdin=True)

        async with Transcript(process) as transcript:
            await transcript.until(b"now\n")
            assert b"later" not in transcript.stdout
            await process.write(b"\n")
            await transcript.until(b"later\n")
            assert (await transcript.ended()).code == 0

    async def test_the_streams_are_apart_and_each_in_order(self, sandbox: Sandbox) -> None:
        code = "import os\nfor n in range(4000): os.write(1 + n % 2, b'%d\\n' % n)"

        result = await sandbox.exec(["python3", "-c", code])

        assert result.stdout == "".join(f"{n}\n" for n in range(0, 4000, 2))
        assert result.stderr == "".join(f"{n}\n" for n in range(1, 4000, 2))

    async def test_a_hundred_megabytes_arrive_whole_in_bounded_memory(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        process = await sandbox.start(["python3", "-c", FLOOD, "100"])
        expected = hashlib.sha256()
        found = hashlib.sha256()
        received = 0
        before_mib = peak_mib = resident_mib()

        async with asyncio.timeout(60 * time_scale):
            async for chunk in process.output():
                assert (chunk.stream, chunk.offset, chunk.lost) == ("stdout", received, 0)
                found.update(chunk.data)
                for number in range(received // MIB, (received + len(chunk.data)) // MIB):
                    expected.update(flood(number))
                received += len(chunk.data)
                peak_mib = max(peak_mib, resident_mib())

        assert received == 100 * MIB
        assert found.digest() == expected.digest()
        assert process.exit is not None
        assert process.exit.code == 0, process.exit
        grown_mib = peak_mib - before_mib
        assert grown_mib < 32, f"the host's memory grew by {grown_mib:.0f} MiB"

    async def test_a_slow_follower_holds_the_process_back_and_loses_nothing(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        process = await sandbox.start(["python3", "-c", FLOOD, "100"])
        async with contextlib.aclosing(process.output()) as chunks:
            found = bytearray((await anext(chunks)).data)
            await asyncio.sleep(2 * time_scale)
            status = await process.status()
            assert status.exit is None, "it wrote on with nobody to read"

            async for chunk in chunks:
                assert chunk.lost == 0
                assert chunk.offset == len(found)
                found += chunk.data

        assert (
            hashlib.sha256(found).digest()
            == hashlib.sha256(b"".join(map(flood, range(100)))).digest()
        )

    async def test_what_nobody_followed_is_kept_up_to_a_bound_and_the_rest_counted(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        process = await sandbox.start(["python3", "-c", FLOOD, "80"])
        async with asyncio.timeout(60 * time_scale):
            while (await process.status()).exit is None:
                await asyncio.sleep(0.02)

        chunks = [chunk async for chunk in process.output()]

        first, *others = chunks
        assert first.lost == first.offset == 16 * MIB, (first.lost, first.offset)
        assert not any(chunk.lost for chunk in others)
        kept = b"".join(chunk.data for chunk in chunks)
        assert kept == b"".join(map(flood, range(16, 80))), "it is the last 64 MiB"

    async def test_a_background_process_outlives_its_command_and_may_go_on_writing(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        marked = mark()
        script = TICKS.format(ticks=10_000, pause=0.02)

        result = await sandbox.exec(["sh", "-c", f"(sh -c '{script}' {marked}) & echo done"])

        assert "done\n" in result.stdout
        [status] = [p for p in await sandbox.processes() if any(marked in a for a in p.argv)]
        process = await sandbox.attach(status.id)

        async def more() -> bool:
            return (await process.status()).stdout_bytes > status.stdout_bytes + 100

        await eventually(more, "more output", timeout_s=10 * time_scale)
        assert marked in await survivors(sandbox, marked), "its output killed it"
        await process.kill()
        assert await survivors(sandbox, marked) == ""

    async def test_a_command_ends_though_a_background_process_holds_its_output(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        marked = mark()
        async with asyncio.timeout(5 * time_scale):
            result = await sandbox.exec(["sh", "-c", f"sleep {marked} & echo done"])

        assert result.stdout == "done\n"
        await sandbox.exec(["pkill", "-f", marked])


@pytest.mark.asyncio(loop_scope="session")
class TestAttaching:
    """A process is found again by its id, by anyone who can reach the machine."""

    async def test_another_sandbox_object_reads_on_without_gap_or_repeat(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        script = TICKS.format(ticks=60, pause=0.01)
        process = await sandbox.start(["sh", "-c", script])
        expected = "".join(f"tick {n}\n" for n in range(60)).encode()
        seen = bytearray()
        async with contextlib.aclosing(process.output()) as chunks:
            async for chunk in chunks:
                seen += chunk.data
                if len(seen) > 100:
                    break

        again = await Sandbox(sandbox.machine).attach(process.id)
        async with asyncio.timeout(20 * time_scale):
            seen += await read_all(again, len(seen))

        assert bytes(seen) == expected
        assert again.pid == process.pid
        assert again.exit is not None
        assert again.exit.code == 0

    @pytest.mark.parametrize("offset", [0, 1, 7, 295_000, 300_000 - 1, 300_000])
    async def test_output_is_read_from_any_byte_after_the_end(
        self, sandbox: Sandbox, offset: int
    ) -> None:
        # More than a guest would hold in memory.
        script = "for i in range(50000): print(f'{i % 100000:05d}')"
        process = await sandbox.start(["python3", "-c", script])
        await process.wait()
        whole = "".join(f"{n:05d}\n" for n in range(50_000)).encode()

        found = await read_all(await sandbox.attach(process.id), offset)

        assert found == whole[offset:]

    async def test_each_stream_has_its_own_offset(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sh", "-c", "printf abcdef; printf uvwxyz >&2"])
        await process.wait()

        chunks = [chunk async for chunk in process.output(stdout_from=2, stderr_from=4)]

        found: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}
        for chunk in chunks:
            found[chunk.stream] += chunk.data
        assert found == {"stdout": b"cdef", "stderr": b"yz"}

    @pytest.mark.parametrize("offset", [-1, 7, 2**62, 2**70])
    async def test_an_offset_nobody_wrote_to_is_refused(
        self, sandbox: Sandbox, offset: int
    ) -> None:
        process = await sandbox.start(["printf", "abcdef"])
        await process.wait()

        with pytest.raises(BadRequest):
            await read_all(process, offset)

    async def test_two_followers_at_once_get_the_same(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        process = await sandbox.start(["python3", "-c", FLOOD, "20"])
        other = await Sandbox(sandbox.machine).attach(process.id)

        async with asyncio.timeout(30 * time_scale):
            first, second = await asyncio.gather(read_all(process), read_all(other))

        assert first == second == b"".join(map(flood, range(20)))

    async def test_an_unknown_process_is_told_as_such(self, sandbox: Sandbox) -> None:
        with pytest.raises(NoSuchProcess):
            await sandbox.attach("0123456789abcdef")

    @pytest.mark.parametrize("name", ["", "../files", "a b", "a/b", "²", "ñ", "a\0"])
    async def test_what_is_no_process_id_is_refused(self, sandbox: Sandbox, name: str) -> None:
        with pytest.raises((BadRequest, NoSuchProcess)):
            await sandbox.attach(name)

    async def test_the_process_list_tells_what_runs_and_what_ended(self, sandbox: Sandbox) -> None:
        marked = mark()
        running = await sandbox.start(["sleep", marked])
        ended = await sandbox.start(["sh", "-c", "echo hello; exit 4"])
        await ended.wait()

        listed = {status.id: status for status in await sandbox.processes()}

        assert listed[running.id].exit is None
        assert listed[running.id].argv == ("sleep", marked)
        assert listed[running.id].pid == running.pid
        told = listed[ended.id]
        assert told.exit is not None
        assert (told.exit.code, told.stdout_bytes, told.stderr_bytes) == (4, 6, 0)
        assert abs(told.started_at - listed[running.id].started_at) < 60
        await running.kill()

    async def test_a_process_can_be_named_before_it_starts(self, sandbox: Sandbox) -> None:
        name = new_process_id()

        process = await sandbox.start(["echo", "named"], process_id=name)

        assert process.id == name
        assert await read_all(await sandbox.attach(name)) == b"named\n"

    async def test_a_named_process_is_started_once(self, sandbox: Sandbox) -> None:
        name = new_process_id()
        starts = [sandbox.start(["sleep", "1000"], process_id=name) for _ in range(5)]

        results = await asyncio.gather(*starts, return_exceptions=True)

        started = [result for result in results if isinstance(result, Process)]
        refused = [result for result in results if isinstance(result, ProcessExists)]
        assert (len(started), len(refused)) == (1, 4), results
        await started[0].kill()
        with pytest.raises(ProcessExists):
            await sandbox.start(["true"], process_id=name)

    async def test_a_name_whose_start_failed_can_be_used_again(self, sandbox: Sandbox) -> None:
        name = new_process_id()
        with pytest.raises(CommandNotStarted):
            await sandbox.start(["no-such-program"], process_id=name)

        process = await sandbox.start(["true"], process_id=name)

        assert (await process.wait()).code == 0

    @pytest.mark.parametrize("name", ["", "x", "0123456789ABCDEF", "0" * 15, "0" * 17, "../x"])
    async def test_a_name_of_no_sense_is_refused(self, sandbox: Sandbox, name: str) -> None:
        with pytest.raises(BadRequest):
            await sandbox.start(["true"], process_id=name)

    async def test_the_list_is_whole_while_processes_start(self, sandbox: Sandbox) -> None:
        for _ in range(5):
            starts = [asyncio.create_task(sandbox.start(["true"])) for _ in range(20)]
            while not all(task.done() for task in starts):
                assert all(status.pid > 0 for status in await sandbox.processes())
            await asyncio.gather(*starts)

    async def test_a_process_is_unknown_until_it_has_begun(self, sandbox: Sandbox) -> None:
        for _ in range(10):
            name = new_process_id()
            start = asyncio.create_task(sandbox.start(["sleep", "1000"], process_id=name))
            while not start.done():
                with contextlib.suppress(NoSuchProcess):
                    await (await sandbox.attach(name)).kill()
            process = await start
            await process.kill()
            assert (await process.wait()).signal == 9

    async def test_old_processes_are_forgotten_and_running_ones_never(
        self, new_sandbox: NewSandbox
    ) -> None:
        sandbox = await new_sandbox(SandboxSpec(pids=512))
        running = await sandbox.start(["sleep", "1000"])
        first = await sandbox.start(["true"])
        await first.wait()
        for _ in range(12):
            await asyncio.gather(*(sandbox.exec(["true"]) for _ in range(10)))

        assert (await (await sandbox.attach(running.id)).status()).exit is None
        with pytest.raises(NoSuchProcess):
            await sandbox.attach(first.id)


@pytest.mark.asyncio(loop_scope="session")
class TestEnding:
    """Signals, kills, and what is left of the dead."""

    async def test_a_kill_proves_that_all_of_it_is_dead(self, sandbox: Sandbox) -> None:
        marked = mark()
        script = f"setsid sleep {marked} & (sleep {marked} &) ; sleep {marked}"
        process = await sandbox.start(["sh", "-c", script])
        async with asyncio.timeout(10):
            while len((await survivors(sandbox, f"^sleep {marked}")).splitlines()) < 3:
                await asyncio.sleep(0.01)

        await process.kill()

        assert await survivors(sandbox, marked) == ""
        ended = await process.wait()
        assert (ended.code, ended.signal, ended.timed_out) == (137, 9, False)

    async def test_to_kill_what_is_dead_is_no_error(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sh", "-c", "exit 5"])
        await process.wait()

        await process.kill()
        await process.kill()

        assert (await process.wait()).code == 5, "the first end is the one that counts"

    async def test_a_signal_reaches_the_command_and_its_group(self, sandbox: Sandbox) -> None:
        script = (
            "sh -c 'trap \"echo child; exit\" USR1; echo up; while :; do sleep 0.01; done' & "
            "trap 'echo parent; wait; exit 7' USR1; echo up; while :; do sleep 0.01; done"
        )
        process = await sandbox.start(["sh", "-c", script])

        async with Transcript(process) as transcript:
            await transcript.until(b"up\nup\n")
            await process.signal(10)
            assert (await transcript.ended()).code == 7, transcript.heard()
            assert b"child" in transcript.stdout
            assert b"parent" in transcript.stdout

    @pytest.mark.parametrize("number", [0, -1, 65, 1000])
    async def test_a_signal_that_does_not_exist_is_refused(
        self, sandbox: Sandbox, number: int
    ) -> None:
        process = await sandbox.start(["sleep", "1000"])

        with pytest.raises(BadRequest):
            await process.signal(number)

        await process.kill()

    async def test_no_orphan_stays_a_zombie(self, sandbox: Sandbox) -> None:
        orphans = "for n in $(seq 20); do (sleep 0.05 &) ; done; sleep 0.5"
        hidden = f"{orphans}; sleep 1000"
        process = await sandbox.start(["sh", "-c", hidden])
        await sandbox.exec(["sh", "-c", orphans])

        left = await sandbox.exec(["ps", "-eo", "pid,stat,args"])

        assert " Z" not in left.stdout, left.stdout
        await process.kill()

    async def test_the_look_for_zombies_can_see_one(self, sandbox: Sandbox) -> None:
        code = "import os, time\nif os.fork(): print('up', flush=True); time.sleep(1000)"
        process = await sandbox.start(["python3", "-c", code])
        async with Transcript(process) as transcript:
            await transcript.until(b"up")

            async def seen() -> bool:
                return " Z" in (await sandbox.exec(["ps", "-eo", "pid,stat,args"])).stdout

            await eventually(seen, "the zombie", timeout_s=10)
        await process.kill()

        left = await sandbox.exec(["ps", "-eo", "pid,stat,args"])
        assert " Z" not in left.stdout, left.stdout
