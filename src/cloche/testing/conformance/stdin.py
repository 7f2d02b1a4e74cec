"""Input: what a process is sent, at the pace it reads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from cloche.core.errors import InputClosed
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.conformance.commands import EVERY_BYTE
from cloche.testing.transcript import Transcript

DIGEST = "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"


@pytest.mark.asyncio(loop_scope="session")
class TestInput:
    """`stdin`, all at once or bit by bit."""

    async def test_a_command_reads_its_input_to_the_end(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["cat"], stdin=b"hello\n")

        assert result.stdout == "hello\n"

    async def test_input_is_binary_safe(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["cat"], stdin=EVERY_BYTE)

        assert result.stdout_bytes == EVERY_BYTE

    async def test_empty_input_is_an_end_of_file(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["wc", "-c"], stdin=b"")

        assert result.stdout.strip() == "0"

    async def test_a_command_without_input_reads_an_end_of_file(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        result = await sandbox.exec(["cat"], timeout_s=10 * time_scale)

        assert (result.stdout, result.exit_code) == ("", 0)

    async def test_five_megabytes_of_input_arrive_whole(self, sandbox: Sandbox) -> None:
        data = hashlib.shake_128(b"input").digest(5_000_000)

        result = await sandbox.exec(["python3", "-c", DIGEST], stdin=data)

        assert result.stdout.strip() == hashlib.sha256(data).hexdigest(), result.stderr

    async def test_five_megabytes_go_in_and_come_out_at_once(self, sandbox: Sandbox) -> None:
        data = hashlib.shake_128(b"both ways").digest(5_000_000)

        result = await sandbox.exec(["cat"], stdin=data)

        assert result.stdout_bytes == data, len(result.stdout_bytes)

    @pytest.mark.parametrize("size", [1, 100_000, 5_000_000])
    @pytest.mark.parametrize("attempt", range(3))
    async def test_a_command_need_not_read_its_input(
        self, sandbox: Sandbox, size: int, attempt: int
    ) -> None:
        result = await sandbox.exec(["sh", "-c", "echo fine; exit 6"], stdin=b"x" * size)

        assert (result.stdout, result.exit_code) == ("fine\n", 6), attempt

    async def test_a_command_may_close_its_input_and_go_on(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(
            ["sh", "-c", "exec 0<&-; sleep 0.3; echo fine"], stdin=b"x" * 5_000_000
        )

        assert result.stdout == "fine\n"

    async def test_a_command_that_ignores_its_input_can_time_out(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sleep", "1000"], stdin=True, timeout_s=0.5)

        with pytest.raises(InputClosed):
            async with asyncio.timeout(20):
                await process.write(b"x" * 5_000_000)

        assert (await process.wait()).timed_out

    async def test_input_can_be_sent_bit_by_bit(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["cat"], stdin=True)

        async with Transcript(process) as transcript:
            for line in (b"one\n", b"two\n", b"three\n"):
                await process.write(line)
                await transcript.until(line)
            await process.write(b"four", close=True)
            assert (await transcript.ended()).code == 0
            assert bytes(transcript.stdout) == b"one\ntwo\nthree\nfour"

    async def test_input_can_be_streamed(self, sandbox: Sandbox) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for number in range(200):
                yield b"%d" % number * 1000
                await asyncio.sleep(0)

        process = await sandbox.start(["python3", "-c", DIGEST], stdin=True)
        whole = b"".join([part async for part in parts()])

        async with Transcript(process) as transcript:
            await process.write(parts(), close=True)
            assert (await transcript.ended()).code == 0, transcript.heard()
            assert transcript.stdout.decode().strip() == hashlib.sha256(whole).hexdigest()

    async def test_writes_wait_for_a_process_that_reads_late(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sh", "-c", "sleep 0.5; wc -c"], stdin=True)

        async with Transcript(process) as transcript:
            await process.write(b"x" * 1_000_000, close=True)
            await transcript.ended()
            assert transcript.stdout.strip() == b"1000000"

    async def test_a_closed_input_takes_nothing_more(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sleep", "1000"], stdin=True)
        await process.write(b"", close=True)

        with pytest.raises(InputClosed):
            await process.write(b"more")

        await process.kill()

    async def test_closing_the_input_while_a_write_waits_ends_the_write(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        process = await sandbox.start(["sleep", "1000"], stdin=True)
        waiting = asyncio.create_task(process.write(b"x" * 1_000_000))
        await asyncio.sleep(0.3 * time_scale)

        await process.write(b"", close=True)

        with pytest.raises(InputClosed):
            async with asyncio.timeout(10 * time_scale):
                await waiting
        for _ in range(5):
            after = await sandbox.exec(["cat"], stdin=b"unharmed")
            assert after.stdout == "unharmed", "other pipes took the closed one's number"
        await process.kill()

    async def test_a_process_started_without_input_takes_none(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sleep", "1000"])

        with pytest.raises(InputClosed):
            await process.write(b"hello")

        await process.kill()

    async def test_a_process_that_has_ended_takes_no_input(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["true"], stdin=True)
        await process.wait()

        with pytest.raises(InputClosed):
            await process.write(b"x" * 5_000_000)
