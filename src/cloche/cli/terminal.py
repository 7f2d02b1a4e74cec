"""`cloche shell`: an interactive terminal in a fresh sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Mapping

from cloche.app import Sandbox
from cloche.core.errors import BadRequest, InputClosed, NoSuchProcess
from cloche.core.spec import SandboxSpec
from cloche.sandbox.process import Process


async def shell(spec: SandboxSpec, env: Mapping[str, str], cwd: str) -> int:
    """Run a login shell on a terminal and return its exit code."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest(
            "`cloche shell` needs a terminal on both ends.",
            remedy="Use `cloche exec --sh '…'` in scripts.",
        )
    async with Sandbox.of(spec) as sandbox:
        sys.stdout.write(f"Sandbox {sandbox.id} on the {sandbox.rung} rung. Ctrl-D to leave.\n")
        sys.stdout.flush()
        terminal = {"TERM": os.environ.get("TERM", "xterm-256color")}
        process = await sandbox.start(
            ["bash", "--login"], env={**terminal, **env}, cwd=cwd, pty=_size()
        )
        return await attach(process)


async def attach(process: Process) -> int:
    """Join our terminal to the process's, until it ends."""
    loop = asyncio.get_running_loop()
    keys: asyncio.Queue[bytes] = asyncio.Queue()
    resizes: set[asyncio.Task[None]] = set()

    def on_resize() -> None:
        task = asyncio.create_task(process.resize(*_size()))
        resizes.add(task)
        task.add_done_callback(resizes.discard)

    with _raw_terminal():
        loop.add_signal_handler(signal.SIGWINCH, on_resize)
        loop.add_reader(0, lambda: keys.put_nowait(os.read(0, 4096)))
        typing = asyncio.create_task(_type(process, keys))
        try:
            async for chunk in process.output():
                sys.stdout.buffer.write(chunk.data)
                sys.stdout.buffer.flush()
        finally:
            loop.remove_reader(0)
            loop.remove_signal_handler(signal.SIGWINCH)
            typing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await typing
    return (await process.wait()).code


async def _type(process: Process, keys: asyncio.Queue[bytes]) -> None:
    async def typed() -> AsyncIterator[bytes]:
        while data := await keys.get():
            yield data

    with contextlib.suppress(InputClosed, NoSuchProcess):
        await process.write(typed(), close=True)


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _size() -> tuple[int, int]:
    # Some terminals do not know their size and say 0.
    size = os.get_terminal_size()
    return size.lines or 24, size.columns or 80
