"""No spelling of a name, and no bytes of a program, get past the policy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from cloche.core.network import Network, decide, settle
from cloche.sandbox import proxy
from cloche.sandbox.dialling import Refused
from cloche.sandbox.line import Line, Via

ONE = settle(Network.model_validate(["*.example.org", "example.net:443"]), {})
NONE = settle(Network.model_validate("none"), {})


@given(st.text(), st.integers(-1, 70000))
def test_whatever_is_asked_is_judged(name: str, port: int) -> None:
    verdict = decide(ONE, name, port)
    plain = name.lower().removesuffix(".")
    assert not decide(NONE, name, port).allowed
    if verdict.allowed:
        assert port in (80, 443)
        assert plain == "example.net" or plain.endswith(".example.org")


@given(st.from_regex(r"[a-z0-9.*:\[\]/-]{1,20}", fullmatch=True))
def test_a_pattern_is_taken_as_it_is_or_refused(pattern: str) -> None:
    with contextlib.suppress(ValueError):
        network = Network.model_validate([pattern])
        assert Network.model_validate(network.model_dump()) == network
        settle(network, {})


@given(st.binary(max_size=400), st.booleans())
def test_a_program_may_send_what_it_likes(data: bytes, socks: bool) -> None:
    asked: list[tuple[str, int]] = []

    @contextlib.asynccontextmanager
    async def refuse(name: str, port: int, _: Via) -> AsyncIterator[Line]:
        asked.append((name, port))
        raise Refused("denied", "no")
        yield

    async def talk() -> bytes:
        ours, theirs = socket.socketpair()
        stream = await asyncio.open_unix_connection(sock=ours)
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        writer.write((b"\x05\x01\x00\x05" if socks else b"") + data)
        writer.write_eof()
        async with asyncio.timeout(5):
            await proxy.serve(stream, refuse)
            stream[1].close()
            said = await reader.read()
        writer.close()
        return said

    said = asyncio.run(talk())
    assert b" 200 " not in said[:20]
    assert all(1 <= port <= 65535 and name.isascii() for name, port in asked)
