"""Dials a name for a machine, and no other address than one that was checked.

The name is looked up here, once; every address it leads to is checked; and what is
dialled is one of those. Whoever owns the name cannot point it elsewhere in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

from cloche.core.addresses import Rules, literal
from cloche.core.machine import ByteStream
from cloche.core.network import Verdict
from cloche.sandbox.lookup import Resolve, Resolver

LOOKUP_S: Final = 10.0
CONNECT_S: Final = 15.0
BUFFER_BYTES: Final = 32 * 1024
"""What is held of one direction of a connection: hundreds of them are open at once."""
_TRIED: Final = 3
"""Addresses of one name that are tried, at most."""

Fault = Literal["denied", "address", "limit", "name", "refused", "timeout", "broken"]
Connect = Callable[[str, int], Awaitable[ByteStream]]


class Refused(Exception):
    """There is no connection to be had. The message is for whoever runs the program."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault
        self.message = message

    @property
    def by_us(self) -> bool:
        return self.fault in ("denied", "address", "limit")


async def connect(address: str, port: int) -> ByteStream:
    """Open a connection to a numeric address."""
    return await asyncio.open_connection(address, port, limit=BUFFER_BYTES)


class Dialler:
    """Opens connections to where the rules permit; one for all machines of a host."""

    def __init__(
        self, rules: Rules, *, resolve: Resolve | None = None, connect: Connect = connect
    ) -> None:
        self.rules = rules
        self._resolve = resolve or Resolver()
        self._connect = connect

    def permits(self, address: str, verdict: Verdict) -> bool:
        if verdict.trusted:
            return self.rules.permit_trusted(address)
        return self.rules.permit(address)

    async def open(self, name: str, port: int, verdict: Verdict) -> tuple[ByteStream, str]:
        """Connect to a name that the policy allows; return the stream, and the address.

        Raises:
            Refused: there is no such name, it leads where it must not, or nobody answers.
        """
        addresses = await self._addresses(name, port)
        # All of them: which one is dialled is chance, and must not matter. They are not told:
        # names inside the operator's network are nobody else's business.
        if not all(self.permits(each, verdict) for each in addresses):
            raise _closed(name)
        return await self._try_each(name, addresses[:_TRIED], port)

    async def _addresses(self, name: str, port: int) -> Sequence[str]:
        spelled = literal(name)
        if spelled is not None:
            return [str(spelled)]
        found: Sequence[str] = ()
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await self._resolve(name, port)
        except TimeoutError:
            raise Refused("timeout", f"looking up {name} took too long") from None
        except (OSError, UnicodeError):
            pass
        if not found:
            raise Refused("name", f"the name {name} is not known")
        return found

    async def _try_each(
        self, name: str, addresses: Sequence[str], port: int
    ) -> tuple[ByteStream, str]:
        refused = Refused("refused", f"no connection to {name} port {port}")
        for address in addresses:
            try:
                # One that swallows what is sent to it leaves time for the next.
                async with asyncio.timeout(CONNECT_S / len(addresses)):
                    stream = await self._connect(address, port)
            except TimeoutError:
                refused = Refused("timeout", f"{name} port {port} does not answer")
            except OSError as error:
                why = error.strerror or "failed"
                refused = Refused("refused", f"no connection to {name} port {port}: {why}")
            else:
                self._check_peer(name, address, stream)
                return stream, address
        raise refused

    def _check_peer(self, name: str, address: str, stream: ByteStream) -> None:
        """Refuse this host's own public address: what listens there need not be public."""
        with contextlib.suppress(TypeError, IndexError):
            ours = stream[1].get_extra_info("sockname")[0]
            theirs = stream[1].get_extra_info("peername")[0]
            if ours == theirs and not self.rules.names(address):
                stream[1].transport.abort()
                raise _closed(name)


def _closed(name: str) -> Refused:
    return Refused("address", f"the address of {name} is not one that machines may connect to")
