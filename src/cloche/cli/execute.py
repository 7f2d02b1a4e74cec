"""`cloche exec`: one thing in a fresh sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from cloche.app import Sandbox
from cloche.cli.show import EXIT_TIMEOUT, print_json
from cloche.core.errors import BadRequest, InputClosed
from cloche.core.process import Exit
from cloche.core.spec import SandboxSpec
from cloche.sandbox.process import Process

_READ_BYTES = 64 * 1024
_JSON_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command line asked for."""

    languages: Sequence[str]
    command: Sequence[str]
    timeout_s: float
    env: Mapping[str, str]
    cwd: str
    spec: SandboxSpec
    as_json: bool


def parse_env(pairs: Sequence[str], option: str = "--env") -> dict[str, str]:
    for pair in pairs:
        if pair.find("=") < 1:
            raise BadRequest(
                f"{option} {pair!r} is not NAME=VALUE.", remedy=f"Write {option} NAME=VALUE."
            )
    return dict(pair.split("=", 1) for pair in pairs)


async def execute(order: Order) -> int:
    """Carry out an order and return the exit code."""
    code = _code(order)
    async with Sandbox.of(order.spec) as sandbox:
        feed = not sys.stdin.isatty() and order.command[0] != "-"
        if code is None:
            process = await sandbox.start(
                order.command, env=order.env, cwd=order.cwd, stdin=feed, timeout_s=order.timeout_s
            )
        else:
            process = await sandbox.start_code(
                order.languages[0],
                code,
                env=order.env,
                cwd=order.cwd,
                stdin=feed,
                timeout_s=order.timeout_s,
            )
        feeding = asyncio.create_task(_feed(process)) if feed else None
        try:
            ended = await (_print_json(process) if order.as_json else _stream(process))
        finally:
            if feeding is not None:
                feeding.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await feeding
    return EXIT_TIMEOUT if ended.timed_out else ended.code


def _code(order: Order) -> str | None:
    """Return the code to run, or None when the order is a plain command."""
    if len(order.languages) > 1:
        raise BadRequest(
            f"{' and '.join(order.languages)} cannot be run at once.", remedy="Choose one."
        )
    if not order.command:
        raise BadRequest(
            "There is nothing to run.",
            remedy="Try `cloche exec -- ls -la` or `cloche exec --python 'print(6*7)'`.",
        )
    if not order.languages:
        return None
    if len(order.command) > 1:
        raise BadRequest(
            "Code is one argument, and there are more.", remedy="Put the code in quotes."
        )
    return sys.stdin.read() if order.command[0] == "-" else order.command[0]


async def _stream(process: Process) -> Exit:
    outputs = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    async for chunk in process.output():
        target = outputs[chunk.stream]
        if chunk.lost:
            sys.stderr.write(f"[{chunk.lost} bytes of {chunk.stream} were lost]\n")
        try:
            target.write(chunk.data)
            target.flush()
        except BrokenPipeError:
            # Whoever read our output has seen enough, as `| head` does.
            await process.kill()
            os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
    ended = await process.wait()
    if ended.timed_out:
        sys.stderr.write("cloche: the command ran out of time; raise --timeout\n")
    return ended


async def _print_json(process: Process) -> Exit:
    output = {"stdout": bytearray(), "stderr": bytearray()}
    truncated = False
    async for chunk in process.output():
        room = _JSON_BYTES - len(output[chunk.stream])
        truncated |= len(chunk.data) > room
        output[chunk.stream] += chunk.data[:room]
    ended = await process.wait()
    print_json(
        {
            "exit_code": ended.code,
            "signal": ended.signal,
            "timed_out": ended.timed_out,
            "duration_s": ended.duration_s,
            "cpu_s": ended.cpu_s,
            "max_rss_kib": ended.max_rss_kib,
            "stdout": output["stdout"].decode(errors="replace"),
            "stderr": output["stderr"].decode(errors="replace"),
            "truncated": truncated,
        }
    )
    return ended


async def _feed(process: Process) -> None:
    # A program that does not read all of its input is no fault of anyone's.
    with contextlib.suppress(InputClosed):
        await process.write(read_stdin(), close=True)


async def read_stdin() -> AsyncIterator[bytes]:
    """Yield what arrives on our standard input, as it comes.

    On a thread of its own: a regular file cannot be polled, and a terminal must
    not be made non-blocking for the shell we came from.
    """
    loop = asyncio.get_running_loop()
    while data := await loop.run_in_executor(None, os.read, 0, _READ_BYTES):
        yield data
