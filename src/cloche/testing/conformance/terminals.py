"""Terminals: for programs that want a person in front of them."""

from __future__ import annotations

import asyncio

import pytest

from cloche.core.errors import BadRequest
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.conformance.limits import mark, survivors
from cloche.testing.transcript import Transcript

RESIZED = (
    "import os, signal, time\n"
    "def tell(*_): print('size', *os.get_terminal_size(), flush=True)\n"
    "signal.signal(signal.SIGWINCH, tell); tell()\n"
    "while True: time.sleep(0.05)\n"
)


@pytest.mark.asyncio(loop_scope="session")
class TestTerminals:
    """A process started with `pty`."""

    async def test_all_three_files_are_the_terminal(self, sandbox: Sandbox) -> None:
        code = (
            "import os; print([os.isatty(n) for n in range(3)], os.ttyname(0), os.environ['TERM'])"
        )
        process = await sandbox.start(["python3", "-c", code], pty=(24, 80))

        async with Transcript(process) as transcript:
            assert (await transcript.ended()).code == 0, transcript.heard()
            assert b"[True, True, True] /dev/pts/" in transcript.stdout
            assert b"xterm-256color" in transcript.stdout

    async def test_without_one_no_file_is_a_terminal(self, sandbox: Sandbox) -> None:
        code = "import os; print([os.isatty(n) for n in range(3)], 'TERM' in os.environ)"

        result = await sandbox.exec(["python3", "-c", code])

        assert result.stdout == "[False, False, False] False\n"

    async def test_the_terminal_has_the_size_that_was_asked_for(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["stty", "size"], pty=(33, 121))

        async with Transcript(process) as transcript:
            await transcript.ended()
            assert transcript.stdout == b"33 121\r\n"

    async def test_a_resize_is_told_to_the_program(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["python3", "-c", RESIZED], pty=(24, 80))

        async with Transcript(process) as transcript:
            await transcript.until(b"size 80 24")
            await process.resize(50, 132)
            await transcript.until(b"size 132 50")
        await process.kill()

    @pytest.mark.parametrize("size", [(0, 80), (24, 0), (-1, 80), (5000, 80)])
    async def test_a_size_of_no_sense_is_refused(
        self, sandbox: Sandbox, size: tuple[int, int]
    ) -> None:
        with pytest.raises(BadRequest):
            await sandbox.start(["true"], pty=size)
        process = await sandbox.start(["sleep", "1000"], pty=(24, 80))
        with pytest.raises(BadRequest):
            await process.resize(*size)
        await process.kill()

    async def test_a_process_without_a_terminal_cannot_be_resized(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sleep", "1000"])

        with pytest.raises(BadRequest, match="terminal"):
            await process.resize(24, 80)

        await process.kill()

    async def test_to_resize_what_has_ended_is_no_error(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["true"], pty=(24, 80))
        await process.wait()

        await process.resize(50, 132)

    async def test_control_c_interrupts_the_program_in_front(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["bash", "--norc"], pty=(24, 80))

        async with Transcript(process) as transcript:
            await process.write(b"sleep 100; echo code=$?\n")
            await transcript.until(b"sleep 100")
            await asyncio.sleep(0.3)
            await process.write(b"\x03")
            await process.write(b"echo alive-$((6*7))\n")
            await transcript.until(b"alive-42")
            await process.write(b"exit 3\n")
            assert (await transcript.ended()).code == 3

    async def test_control_d_is_the_end_of_the_input(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["cat"], pty=(24, 80))

        async with Transcript(process) as transcript:
            await process.write(b"hello\n")
            await transcript.until(b"hello\r\nhello\r\n")
            await process.write(b"\x04")
            assert (await transcript.ended()).code == 0

    @pytest.mark.parametrize("last", [b"hello\n", b"half a line"])
    async def test_closing_the_input_ends_a_program_that_reads_to_the_end(
        self, sandbox: Sandbox, last: bytes
    ) -> None:
        process = await sandbox.start(["cat"], pty=(24, 80))

        async with Transcript(process, timeout_s=10) as transcript:
            await process.write(last, close=True)
            assert (await transcript.ended()).code == 0, transcript.heard()

    async def test_a_shell_has_job_control(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["bash", "--norc", "-i"], pty=(24, 80))

        async with Transcript(process) as transcript:
            await process.write(b"sleep 1000 &\n")
            await process.write(b"jobs; kill %1; wait %1; echo jobs-$((6*7))\n")
            await transcript.until(b"jobs-42")
            assert b"Running" in transcript.stdout, transcript.heard()
            assert b"no job control" not in transcript.stdout, transcript.heard()
            await process.write(b"exit\n")
            await transcript.ended()

    async def test_a_terminals_last_words_are_not_lost(self, sandbox: Sandbox) -> None:
        for _ in range(10):
            process = await sandbox.start(["sh", "-c", "seq 2000; echo bye"], pty=(24, 80))
            async with Transcript(process) as transcript:
                await transcript.ended()
                assert transcript.stdout.endswith(b"2000\r\nbye\r\n"), transcript.heard()

    async def test_the_end_of_a_terminal_hangs_its_programs_up(self, sandbox: Sandbox) -> None:
        marked = mark()
        process = await sandbox.start(["bash", "--norc"], pty=(24, 80))

        async with Transcript(process) as transcript:
            await process.write(f"sleep {marked} & sleep {marked}\n".encode())
            await transcript.until(marked.encode())
            await asyncio.sleep(0.2)
            await process.kill()

        assert await survivors(sandbox, marked) == ""

    async def test_many_terminals_are_open_at_once(self, sandbox: Sandbox) -> None:
        processes = [await sandbox.start(["cat"], pty=(24, 80)) for _ in range(20)]

        for number, process in enumerate(processes):
            async with Transcript(process) as transcript:
                await process.write(b"line %d\n" % number, close=True)
                await transcript.ended()
                assert bytes(transcript.stdout).count(b"line %d\r\n" % number) == 2
