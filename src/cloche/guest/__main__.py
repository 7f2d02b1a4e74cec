"""Entry point: process 1 of every machine."""

from __future__ import annotations

import gc
import os
import sys

from cloche.guest import later

LISTEN_FD = 3
"""The machine's channel: a listening socket the backend made and left open for us."""


def main() -> None:
    if len(sys.argv) != 1:
        sys.exit("The guest takes no arguments: it serves the socket at file descriptor 3.")
    later.install()
    import socket  # noqa: PLC0415 - not before the line above

    from cloche.guest import server  # noqa: PLC0415

    # Nothing of what was loaded is ever garbage: it need not be looked through for any.
    gc.freeze()
    gc.enable()  # The launcher has turned it off.
    try:
        channel = socket.socket(fileno=LISTEN_FD)
    except OSError as error:
        sys.exit(f"The guest needs a listening socket at file descriptor {LISTEN_FD}: {error}")
    os.set_inheritable(LISTEN_FD, False)
    server.run(channel)


if __name__ == "__main__":
    main()
