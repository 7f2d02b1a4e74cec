"""How the command line speaks: errors, exit codes, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from cloche.core.errors import ClocheError, CommandTimeout, UserError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

EXIT_USER = 2
EXIT_TIMEOUT = 124
"""As timeout(1) ends."""
EXIT_CLOCHE = 125
"""As docker run ends when the fault is not the command's."""


def show_error(error: ClocheError) -> int:
    """Print what went wrong and what to do; return the exit code that says who must act."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(error.message)}")
    console.print(f"  [cyan]try:[/] {escape(error.remedy)} [dim]({error.code})[/]")
    if isinstance(error, CommandTimeout):
        return EXIT_TIMEOUT
    return EXIT_USER if isinstance(error, UserError) else EXIT_CLOCHE


def run(main: Coroutine[Any, Any, T], *, serving: bool = False) -> T:
    """Run a command's coroutine; a signal that ends it ends it in order, with nothing left.

    A server runs on uvloop, whose start-up time a single command would not win back.
    """
    import asyncio
    import signal

    received: list[int] = []

    async def body() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main)

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        # Ctrl-C, `kill`, and a terminal that is closed.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        return await task

    try:
        with asyncio.Runner(loop_factory=_fast_loop if serving else None) as runner:
            return runner.run(body())
    except asyncio.CancelledError:
        sys.exit(128 + received[0])


def _fast_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
