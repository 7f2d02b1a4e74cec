"""How the command line speaks: errors, exit codes, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from cloche.core.errors import ClocheError, CommandTimeout, UserError

T = TypeVar("T")

EXIT_USER = 2
EXIT_TIMEOUT = 124
"""As timeout(1) ends."""
EXIT_CLOCHE = 125
"""As docker run ends when the fault is not the command's."""
EXIT_INTERRUPTED = 130


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


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; Ctrl-C ends it in order, with nothing left behind."""
    import asyncio

    try:
        return asyncio.run(main)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
