"""The host's end of the channel, with every kind of guest at the other one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import resource
from collections.abc import AsyncIterator

import pytest

from cloche.core.errors import (
    BadRequest,
    GuestMisbehaved,
    MachineFull,
    MachineNotStarted,
    MachinePaused,
    NoSuchFile,
    OutputTooLarge,
    ReplyTooLarge,
    SandboxLost,
)
from cloche.core.image import Image
from cloche.core.spec import SandboxSpec
from cloche.sandbox import client
from cloche.sandbox import sandbox as sandbox_module
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.fakes import (
    BabblingMachine,
    DeafMachine,
    DyingMachine,
    IdleBackend,
    IdleMachine,
    LyingMachine,
    SlowMachine,
    answer,
)

IMAGE = Image(name="base", digest="0" * 64, layers=())
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
STARTED = {
    "id": "0" * 16, "pid": 1, "argv": ["x"], "pty": False, "started_at": 0.0, "stdout_bytes": 0,
    "stderr_bytes": 0, "exit": None,
}  # fmt: skip
EXIT = {
    "code": 0, "signal": None, "timed_out": False, "duration_s": 0.0, "cpu_s": 0.0,
    "max_rss_kib": 0,
}  # fmt: skip


def output(offset: int, data: bytes, lost: int = 0) -> dict[str, object]:
    text = base64.b64encode(data).decode()
    return {"stream": "stdout", "offset": offset, "lost": lost, "data": text}


@contextlib.asynccontextmanager
async def sandbox_over(machine: IdleMachine) -> AsyncIterator[Sandbox]:
    try:
        yield Sandbox(machine)
    finally:
        await machine.destroy()


async def test_an_honest_guest_is_understood() -> None:
    said = answer({"started": STARTED}, output(0, b"he"), output(2, b"llo"), {"exit": EXIT})
    async with sandbox_over(LyingMachine(says=said)) as sandbox:
        result = await sandbox.exec(["x"])

    assert (result.stdout, result.exit_code) == ("hello", 0)


@pytest.mark.parametrize(
    "says",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
        answer("no object"),
        answer({"started": STARTED}, "no object"),
        answer({"started": STARTED}, output(1, b"gap"), {"exit": EXIT}),
        answer({"started": STARTED}, output(0, b"a"), output(0, b"a"), {"exit": EXIT}),
        answer({"started": STARTED}, {"exit": EXIT}, output(0, b"late")),
        answer({"started": STARTED}, {"exit": EXIT}, {"exit": EXIT}),
        answer({"started": STARTED}, {"alive": True}),
        answer({"started": {**STARTED, "id": "../x"}}, {"exit": EXIT}),
        answer({"started": STARTED}, {"stream": "stdout", "data": "***"}, {"exit": EXIT}),
        answer({"started": STARTED}, {"stream": "stdout", "data": "ÄÄÄÄ"}, {"exit": EXIT}),
        answer({"started": STARTED}, {"surprise": 1}, {"exit": EXIT}),
        answer({"code": "invented", "message": "x"}, status="400 Bad Request"),
        answer({"code": "bad_request"}, status="400 Bad Request"),
        answer({}, status="500 Oh"),
        answer({}, status="999 Oh"),
        HEAD + b"x-file-size: many\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_a_lying_guest_is_found_out(says: bytes) -> None:
    async with sandbox_over(LyingMachine(says=says)) as sandbox:
        with pytest.raises(GuestMisbehaved) as caught:
            await sandbox.exec(["x"])

    assert caught.value.message.isprintable(), "what a guest chose is shown as it is"


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        answer({"started": STARTED}, {"exit": EXIT})[:-1],
        b"HTTP/1.1 200",
        HEAD,
        CHUNKED,
        CHUNKED + b"5\r\nhel",
        HEAD + b"content-length: 100\r\n\r\n{",
        b"HTTP/1.1 102 Processing\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_a_lost_machine(says: bytes) -> None:
    async with sandbox_over(LyingMachine(says=says)) as sandbox:
        with pytest.raises(SandboxLost):
            await sandbox.exec(["x"])
        with pytest.raises(SandboxLost):
            await sandbox.files.read("/workspace/x")


async def test_a_machine_that_dies_in_the_middle_of_a_call_is_lost() -> None:
    async with sandbox_over(DyingMachine(calls_left=1)) as sandbox:
        await sandbox.hello()
        for _ in range(2):
            with pytest.raises(SandboxLost):
                await sandbox.exec(["x"])


async def test_a_machine_that_hangs_up_is_lost() -> None:
    machine = DeafMachine()
    async with sandbox_over(machine) as sandbox:
        calls = [
            asyncio.create_task(sandbox.exec(["x"])),
            asyncio.create_task(sandbox.exec(["x"], stdin=b"y" * 5_000_000)),
            asyncio.create_task(sandbox.files.write("/workspace/x", b"y" * 5_000_000)),
            asyncio.create_task(sandbox.files.read("/workspace/x")),
        ]
        await asyncio.sleep(0.1)
        await machine.hang_up()

        results = await asyncio.gather(*calls, return_exceptions=True)

    assert [type(result) for result in results] == [SandboxLost] * 4, results


async def test_a_deaf_guest_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.1)
    async with sandbox_over(DeafMachine()) as sandbox:
        for call in (sandbox.exec(["x"]), sandbox.processes(), sandbox.files.read("/tmp/x")):
            with pytest.raises(GuestMisbehaved, match="does not answer"):
                await call


async def test_a_slow_guest_is_waited_for() -> None:
    async with sandbox_over(SlowMachine(delay_s=0.1)) as sandbox:
        assert (await sandbox.exec(["x"])).exit_code == 0


async def test_signs_of_life_keep_a_slow_guest_from_being_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Patient(SlowMachine):
        async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
            for _ in range(10):
                writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
                await asyncio.sleep(0.05)
            await IdleMachine.respond(self, call, writer)

    monkeypatch.setattr(client, "ANSWER_S", 0.2)
    async with sandbox_over(Patient(delay_s=0)) as sandbox:
        assert (await sandbox.exec(["x"])).exit_code == 0


@pytest.mark.parametrize(
    ("says", "forever"),
    [
        (b"", b"x"),
        (b"HTTP/1.1 200 OK\r\n", b"x-more: y\r\n"),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (CHUNKED, b"5\r\nhello\r\n"),
        (CHUNKED, b"1\r\n\n\r\n"),
        (CHUNKED, b"14\r\n" + b'{"alive": true}    \n\r\n'),
        (b"HTTP/1.1 400 No\r\ntransfer-encoding: chunked\r\n\r\n", b"5\r\nhello\r\n"),
        (CHUNKED + b"5;", b"x"),
    ],
)
async def test_a_babbling_guest_does_not_fill_the_memory(
    says: bytes, forever: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "_BEGIN_S", 0.1)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with sandbox_over(BabblingMachine(says=says, forever=forever)) as sandbox:
        for call in (sandbox.exec(["x"]), sandbox.processes()):
            with pytest.raises((GuestMisbehaved, ReplyTooLarge, TimeoutError)):
                async with asyncio.timeout(0.5):
                    await call

    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 128 << 10, f"{grown_kib >> 10} MiB"


async def test_endless_output_stops_at_the_callers_bound() -> None:
    said = CHUNKED + b"%x\r\n%s\n\r\n" % (len(line := _line({"started": STARTED})) + 1, line)
    machine = _Counting(says=said)
    async with sandbox_over(machine) as sandbox:
        with pytest.raises((OutputTooLarge, BadRequest)) as caught:
            await sandbox.exec(["x"], max_output_bytes=1_000_000)

    assert "POST /processes/0000000000000000/kill" in machine.calls, caught.value


class _Counting(LyingMachine):
    """Follows its start with honest output that never ends."""

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        if call.endswith("/kill"):
            writer.write(answer({**STARTED, "exit": EXIT}))
            return
        writer.write(self.says)
        for offset in range(0, 1 << 40, 30_000):
            line = _line(output(offset, b"x" * 30_000))
            writer.write(b"%x\r\n%s\n\r\n" % (len(line) + 1, line))
            await writer.drain()


def _line(message: object) -> bytes:
    return answer(message).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("code", "kind"),
    [("no_such_file", NoSuchFile), ("machine_full", MachineFull), ("bad_request", BadRequest)],
)
async def test_a_refusal_becomes_the_error_it_names(code: str, kind: type[Exception]) -> None:
    said = answer({"code": code, "message": "why \x1b[31mnot"}, status="400 No")
    async with sandbox_over(LyingMachine(says=said)) as sandbox:
        with pytest.raises(kind) as caught:
            await sandbox.files.read("/workspace/x")

    assert str(caught.value) == "why \N{REPLACEMENT CHARACTER}[31mnot"


async def test_a_file_larger_than_allowed_is_not_read_to_its_end() -> None:
    machine = BabblingMachine(says=HEAD + b"content-length: 99999999999\r\n\r\n")
    async with sandbox_over(machine) as sandbox:
        with pytest.raises(ReplyTooLarge):
            await sandbox.files.read("/workspace/x", max_bytes=100_000)


async def test_a_paused_machine_is_not_called() -> None:
    machine = IdleMachine()
    async with sandbox_over(machine) as sandbox:
        await sandbox.pause()
        with pytest.raises(MachinePaused):
            await sandbox.exec(["x"])
        assert machine.calls == []


async def test_a_silence_by_order_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    machine = SlowMachine(delay_s=0.3)
    async with sandbox_over(machine) as sandbox:
        task = asyncio.create_task(sandbox.exec(["x"]))
        await asyncio.sleep(0.32)  # Half of the wait is `alive`.
        await sandbox.pause()

        assert (await task).exit_code == 0


async def test_what_makes_no_sense_is_not_even_sent() -> None:
    machine = IdleMachine()
    async with sandbox_over(machine) as sandbox:
        for call in (
            sandbox.exec([]), sandbox.exec(["a\0"]), sandbox.exec(["a"], timeout_s=0),
            sandbox.exec(["a"], max_output_bytes=-1), sandbox.exec(["\ud800"]),
            sandbox.run_code("python", "\ud800"), sandbox.attach("../x"), sandbox.attach("ñ"),
            sandbox.tunnel(), sandbox.tunnel(port=0), sandbox.tunnel(unix="\ud800"),
            sandbox.files.read(""), sandbox.files.read("x", offset=-1),
            sandbox.files.glob("\ud800"), sandbox.files.grep("\ud800"),
        ):  # fmt: skip
            with pytest.raises(BadRequest):
                await call

    assert machine.calls == []


@pytest.mark.parametrize(
    "kind", [DyingMachine, LyingMachine, lambda spec: LyingMachine(spec, says=b"\x1b[2J")]
)
async def test_a_machine_whose_guest_does_not_say_hello_is_destroyed(
    kind: type[IdleMachine],
) -> None:
    backend = IdleBackend(kind)

    with pytest.raises(MachineNotStarted, match="last words of a fake"):
        await Sandbox.start_on(backend, SandboxSpec(), IMAGE)

    assert backend.left == []


async def test_a_start_that_is_cancelled_leaves_no_machine() -> None:
    backend = IdleBackend(DeafMachine)
    task = asyncio.create_task(Sandbox.start_on(backend, SandboxSpec(), IMAGE))
    await asyncio.sleep(0.05)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert backend.left == []
