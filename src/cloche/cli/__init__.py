"""The command line. Each command is one file, and loads what it needs when it is called."""

from __future__ import annotations


def main() -> None:
    """Run `cloche`; an error of ours ends in one sentence and its remedy, not a traceback."""
    import sys

    from cloche.cli.commands import app
    from cloche.cli.show import show_error
    from cloche.core.errors import ClocheError

    try:
        app()
    except ClocheError as error:
        sys.exit(show_error(error))
