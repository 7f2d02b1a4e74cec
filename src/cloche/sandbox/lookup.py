"""Looks up where names lead, for those who check every address before they dial one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

_LOOKUPS: Final = 128
"""Names that may be looked up at once: one whose servers are silent takes a minute to fail."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Resolver:
    """Looks names up in threads of its own.

    A loop's own threads are few, and a name whose servers do not answer holds one long after
    nobody waits for it any more: others' work would stand still behind it. And a daemon's
    thread does not hold up the end of the process.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_LOOKUPS)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[str]] = loop.create_future()

        def settle(addresses: Sequence[str], error: OSError | UnicodeError | None) -> None:
            self._free.release()
            if found.done():
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)

        def look_up() -> None:
            addresses: Sequence[str] = ()
            error: OSError | UnicodeError | None = None
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
            except (OSError, UnicodeError) as failed:
                error = failed
            with contextlib.suppress(RuntimeError):  # The loop has ended: nobody waits.
                loop.call_soon_threadsafe(settle, addresses, error)

        threading.Thread(target=look_up, name="lookup", daemon=True).start()
        return await found
