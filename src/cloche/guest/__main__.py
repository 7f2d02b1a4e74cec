"""Entry point: process 1 of every machine."""

from __future__ import annotations

import os
import socket
import sys

LISTEN_FD = 3
"""The machine's channel: a listening socket the backend made and left open for us."""


def main() -> None:
    if len(sys.argv) != 1:
        sys.exit("The guest takes no arguments: it serves the socket at file descriptor 3.")
    # asyncio loads TLS when it can. The guest never speaks it, and without it
    # starts sooner and smaller.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    from cloche.guest import server  # noqa: PLC0415 - not before the line above

    try:
        channel = socket.socket(fileno=LISTEN_FD)
    except OSError as error:
        sys.exit(f"The guest needs a listening socket at file descriptor {LISTEN_FD}: {error}")
    os.set_inheritable(LISTEN_FD, False)
    server.run(channel)


if __name__ == "__main__":
    main()
