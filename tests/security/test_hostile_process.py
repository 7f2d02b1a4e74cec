"""A guest that was taken over: what it says of processes, line by line."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path

import pytest

from cloche.core.errors import ClocheError, GuestMisbehaved, OutputTooLarge
from cloche.core.process import ExecResult
from cloche.sandbox import client
from cloche.sandbox import sandbox as sandbox_module
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox

from . import hostile
from .hostile import CHUNKED, PROCESS_ID, Behaviour, HostileMachine, chunk, hold, reply, says

ANSWER_S = 0.4
STATUS = {
    "id": PROCESS_ID, "pid": 7, "argv": ["true"], "pty": False, "started_at": 0.0,
    "stdout_bytes": 0, "stderr_bytes": 0, "exit": None,
}  # fmt: skip
EXIT = {
    "code": 0, "signal": None, "timed_out": False, "duration_s": 0.0, "cpu_s": 0.0,
    "max_rss_kib": 0,
}  # fmt: skip
START = {"started": STATUS}
END = {"exit": EXIT}


def out(offset: int, data: bytes = b"ab", stream: str = "stdout", **fields: object) -> dict:
    text = base64.b64encode(data).decode()
    return {"stream": stream, "offset": offset, "data": text, **fields}


LIES: dict[str, list[object]] = {
    "no start": [out(0), END],
    "an exit before the start": [END, START],
    "an exit alone": [END],
    "a sign of life before the start": [{"alive": True}, START, END],
    "a second start": [START, START, END],
    "a second start of another": [START, {"started": {**STATUS, "id": "f" * 16}}, END],
    "no end": [START, out(0)],
    "output after the end": [START, END, out(0)],
    "a sign of life after the end": [START, END, {"alive": True}],
    "a second end": [START, END, END],
    "a gap": [START, out(0), out(5), END],
    "a repeat": [START, out(0), out(0), END],
    "a step back": [START, out(0), out(1), END],
    "a late beginning": [START, out(7), END],
    "a gap that was lost, but not told in full": [START, out(9, lost=8), END],
    "a negative offset": [START, out(-1), END],
    "an offset beyond numbers": [START, out(1 << 80), END],
    "an offset as text": [START, {**out(0), "offset": "0"}, END],
    "an offset as a float": [START, {**out(0), "offset": 0.5}, END],
    "a negative loss": [START, out(0, lost=-1), END],
    "a loss beyond numbers": [START, out(1 << 63, lost=1 << 63), END],
    "another stream": [START, out(0, stream="stdin"), END],
    "a stream that is none": [START, {**out(0), "stream": 1}, END],
    "data that is not base64": [START, {**out(0), "data": "****"}, END],
    "data with bad padding": [START, {**out(0), "data": "YQ"}, END],
    "data with too much padding": [START, {**out(0), "data": "YQ===="}, END],
    "data with spaces": [START, {**out(0), "data": "YW Jj"}, END],
    "data in another alphabet": [START, {**out(0), "data": "-_-_"}, END],
    "data beyond ASCII": [START, {**out(0), "data": "\\u00e4\\u00e4\\u00e4\\u00e4"}, END],
    "data as a number": [START, {**out(0), "data": 7}, END],
    "data too long for a line": [START, out(0, bytes(200_000)), END],
    "an exit code of 999": [START, {"exit": {**EXIT, "code": 999}}],
    "an exit code below zero": [START, {"exit": {**EXIT, "code": -1}}],
    "an exit code as text": [START, {"exit": {**EXIT, "code": "0"}}],
    "signal 0": [START, {"exit": {**EXIT, "signal": 0}}],
    "signal 65": [START, {"exit": {**EXIT, "signal": 65}}],
    "a time that is not a number": [START, {"exit": {**EXIT, "duration_s": float("nan")}}],
    "an endless time": [START, {"exit": {**EXIT, "cpu_s": float("inf")}}],
    "a time below zero": [START, {"exit": {**EXIT, "cpu_s": -0.1}}],
    "a truth as a number": [START, {"exit": {**EXIT, "timed_out": 1}}],
    "memory below zero": [START, {"exit": {**EXIT, "max_rss_kib": -1}}],
    "an exit with more to it": [START, {"exit": {**EXIT, "core": "/etc/shadow"}}],
    "half an exit": [START, {"exit": {"code": 0}}],
    "an id with a path in it": [{"started": {**STATUS, "id": "../../../../x"}}, END],
    "an id with a line end": [{"started": {**STATUS, "id": PROCESS_ID + "\n"}}, END],
    "an id of other digits": [{"started": {**STATUS, "id": "\\u0660" * 16}}, END],
    "an id that is too long": [{"started": {**STATUS, "id": "0" * 64}}, END],
    "pid 0": [{"started": {**STATUS, "pid": 0}}, END],
    "pid -1": [{"started": {**STATUS, "pid": -1}}, END],
    "a pid beyond pids": [{"started": {**STATUS, "pid": 1 << 40}}, END],
    "arguments that are none": [{"started": {**STATUS, "argv": "true"}}, END],
    "an unknown field": [START, {"eval": "1"}, END],
    "a list": [START, [], END],
    "null": [START, None, END],
    "a number": [START, 7, END],
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", ANSWER_S)
    monkeypatch.setattr(sandbox_module, "_GRACE_S", ANSWER_S)


def lines(*messages: object) -> bytes:
    text = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    return CHUNKED + chunk(text) + b"0\r\n\r\n"


async def test_an_honest_guest_is_believed(tmp_path: Path) -> None:
    """The positive control: these lines, told in order, are a command that ran."""
    honest = [START, out(0), {"alive": True}, out(0, b"err", "stderr"), out(9, b"c", lost=7), END]
    async with HostileMachine(tmp_path, says(lines(*honest))) as machine:
        result = await Sandbox(machine).exec(["true"])

    assert (result.stdout_bytes, result.stderr_bytes, result.exit_code) == (b"abc", b"err", 0)


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_found_out(tmp_path: Path, lie: str) -> None:
    async with HostileMachine(tmp_path, says(lines(*LIES[lie]))) as machine:
        outcomes = {
            call: await hostile.outcome_of(call, machine, within_s=5)
            for call in ("exec", "exec with stdin", "run_code")
        }
        # One that is followed was started before: the rest of the story is the same.
        rest = [message for message in LIES[lie] if message != START]
        followed: object = GuestMisbehaved("", remedy="")
        if len(rest) == len(LIES[lie]) - 1:
            machine._behaviour = says(lines(*rest))
            followed = await hostile.outcome_of("output", machine, within_s=5)

    assert {call: type(outcome) for call, outcome in outcomes.items()} == dict.fromkeys(
        outcomes, GuestMisbehaved
    ), outcomes
    # Without its start, the order of start and end cannot be told.
    if lie not in ("an exit before the start", "a sign of life before the start"):
        assert isinstance(followed, GuestMisbehaved), followed


@pytest.mark.parametrize(
    "raw",
    [b"\n", b"{}\n\n", b"\0\n", b"{\n", b'{"alive": tru', b"\xff\xfe\n", b"[" * 5000 + b"\n",
     b'{"offset": ' + b"9" * 5000 + b"}\n", b'{"alive": true}', b"\r\n", b"data: x\n"],
)  # fmt: skip
async def test_a_line_that_is_none_is_found_out(tmp_path: Path, raw: bytes) -> None:
    start = json.dumps(START).encode() + b"\n"
    answer = CHUNKED + chunk(start) + chunk(raw) + b"0\r\n\r\n"
    async with HostileMachine(tmp_path, says(answer)) as machine:
        for call in ("exec", "output", "watch"):
            outcome = await hostile.outcome_of(call, machine, within_s=5)
            assert isinstance(outcome, GuestMisbehaved), f"{call}: {outcome!r}"


@pytest.mark.parametrize("call", ["attach", "status", "wait"])
async def test_another_process_is_not_taken_for_the_one_asked_for(
    tmp_path: Path, call: str
) -> None:
    other = json.dumps({**STATUS, "id": "f" * 16}).encode()
    async with HostileMachine(tmp_path, says(reply(other))) as machine:
        outcome = await hostile.outcome_of(call, machine, within_s=5)

    assert isinstance(outcome, GuestMisbehaved), outcome


async def test_a_process_that_was_named_is_the_one_that_starts(tmp_path: Path) -> None:
    other = json.dumps({**STATUS, "id": "f" * 16}).encode()
    async with HostileMachine(tmp_path, says(reply(other))) as machine:
        with pytest.raises(GuestMisbehaved):
            await Sandbox(machine).start(["true"], process_id=PROCESS_ID)


def _floods(stream: str) -> Behaviour:
    """Start honestly, and write for ever, each byte in its place; do not answer a kill."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/kill" in head:
            await hold(reader, writer)
            return
        writer.write(CHUNKED + chunk(json.dumps(START).encode() + b"\n"))
        offset = 0
        while True:
            line = json.dumps(out(offset, bytes(65536), stream)).encode() + b"\n"
            writer.write(chunk(line))
            await writer.drain()
            offset += 65536

    return behave


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_flood_ends_at_the_callers_bound(tmp_path: Path, stream: str) -> None:
    limit = 2 << 20
    async with HostileMachine(tmp_path, _floods(stream)) as machine:
        with hostile.peak_memory() as grown_mib:
            began = time.monotonic()
            with pytest.raises((OutputTooLarge, GuestMisbehaved)):
                await Sandbox(machine).exec(["true"], timeout_s=5, max_output_bytes=limit)

            assert grown_mib() < 64, "MiB"
    assert time.monotonic() - began < 5
    assert machine.sent < 4 * limit


async def test_a_process_that_never_ends_is_left_at_the_deadline(tmp_path: Path) -> None:
    """Signs of life for ever: the command's own time is up, whatever the guest says."""

    async def lives(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + chunk(json.dumps(START).encode() + b"\n"))
        while True:
            writer.write(chunk(b'{"alive": true}\n'))
            await writer.drain()
            await asyncio.sleep(0.02)

    async with HostileMachine(tmp_path, lives) as machine:
        began = time.monotonic()
        with pytest.raises(GuestMisbehaved):
            await Sandbox(machine).exec(["true"], timeout_s=0.5)

    assert time.monotonic() - began < 3


async def test_a_caller_can_leave_a_guest_that_never_ends(tmp_path: Path) -> None:
    async with HostileMachine(tmp_path, hostile.says(CHUNKED, then=hostile.repeat(
        chunk(b'{"alive": true}\n' * 100)
    ))) as machine:  # fmt: skip
        process = Process(Sandbox(machine)._client, PROCESS_ID, 7)
        for call in (process.wait, process.status):
            began = time.monotonic()
            with pytest.raises((TimeoutError, ClocheError)):
                async with asyncio.timeout(0.3):
                    await call()
            assert time.monotonic() - began < 2


async def test_a_cancelled_command_is_cancelled_though_the_guest_is_silent(
    tmp_path: Path,
) -> None:
    async with HostileMachine(tmp_path, says(CHUNKED + chunk(
        json.dumps(START).encode() + b"\n"), then=hold)) as machine:  # fmt: skip
        command = asyncio.ensure_future(Sandbox(machine).exec(["true"], timeout_s=60))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command

    assert time.monotonic() - began < 3


async def test_output_in_error_is_kept_as_bytes(tmp_path: Path) -> None:
    """What a command wrote is data: not cleaned, not decoded, and not in the message."""
    raw = b"\x1b]0;owned\x07\xff\xfe"
    story = [START, out(0, raw), {"exit": {**EXIT, "code": 137, "signal": 9}}]
    async with HostileMachine(tmp_path, says(lines(*story))) as machine:
        result = await Sandbox(machine).exec(["true"])

    assert isinstance(result, ExecResult)
    assert result.stdout_bytes == raw
    assert result.exit.reason == "killed by SIGKILL"
