"""The proxy's two tongues, spoken well and badly, with a real server behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from cloche.core.addresses import Rules, parse_range
from cloche.core.network import Attempt, Network, settle
from cloche.sandbox import proxy
from cloche.sandbox.dialling import Dialler
from cloche.sandbox.egress import Egress
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.fakes import IdleMachine

LOOPBACK = Rules((parse_range("127.0.0.0/8"),))


class Server:
    """Keeps what it hears, and says what it was told to."""

    def __init__(self) -> None:
        self.heard = b""
        self.says = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            self.heard += await reader.readuntil(b"\r\n\r\n")
            writer.write(self.says)
            await writer.drain()
            while data := await reader.read(65536):
                self.heard += data
        writer.close()


class Bench:
    """A proxy, a server behind it, and what was told of who tried what."""

    def __init__(self, port: int, server: Server) -> None:
        self.port = port
        self.server = server
        self.told: list[Attempt] = []
        policy = settle(Network.model_validate({"allow": [f"127.0.0.1:{port}"]}), {})
        dialler = Dialler(LOOPBACK)
        sandbox = Sandbox(IdleMachine())
        self.egress = Egress(sandbox, policy, dialler, tell=self.told.append)

    async def say(self, data: bytes, *, more: bytes = b"") -> bytes:
        """Send bytes as a program does, and return all that comes back."""
        ours, theirs = socket.socketpair()
        stream = await asyncio.open_unix_connection(sock=ours)
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        serving = asyncio.create_task(self.egress._serve(stream))
        writer.write(data)
        if more:
            await asyncio.sleep(0.05)
            writer.write(more)
        writer.write_eof()
        async with asyncio.timeout(10):
            said = await reader.read()
            writer.close()
            await serving
        return said


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    server = Server()
    listening = await asyncio.start_server(server.greet, "127.0.0.1", 0)
    yield Bench(listening.sockets[0].getsockname()[1], server)
    listening.close()


async def test_a_request_is_written_anew_without_what_was_for_us(bench: Bench) -> None:
    said = await bench.say(
        f"GET http://127.0.0.1:{bench.port}/a?b HTTP/1.1\r\nHost: lies.example\r\n"
        "Proxy-Authorization: Basic secret\r\nProxy-Connection: keep-alive\r\nTE: trailers\r\n"
        "Connection: x-mine, close\r\nX-Mine: 1\r\nX-Theirs: 2\r\nUpgrade: h2c\r\n\r\n".encode()
    )
    assert said.endswith(b"\r\n\r\nok"), said
    lines = bench.server.heard.decode().lower().split("\r\n")
    assert lines[0] == "get /a?b http/1.1"
    assert sorted(line for line in lines[1:] if line) == [
        "connection: close", f"host: 127.0.0.1:{bench.port}", "x-theirs: 2",
    ]  # fmt: skip
    [attempt] = bench.told
    assert (attempt.verdict, attempt.via, attempt.address) == ("allowed", "http", "127.0.0.1")
    assert attempt.bytes_up > 0
    assert attempt.bytes_down > 0
    assert attempt.rule


async def test_a_body_arrives_in_chunks_and_by_length(bench: Bench) -> None:
    head = f"POST http://127.0.0.1:{bench.port}/ HTTP/1.1\r\nHost: x\r\n"
    bench.server.says = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    for framing in (
        "Content-Length: 5\r\n\r\nhello",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ):
        bench.server.heard = b""
        said = await bench.say((head + framing).encode())
        assert said.startswith(b"HTTP/1.1 200"), said
        await asyncio.sleep(0.05)
        assert b"hello" in bench.server.heard


async def test_several_requests_on_one_connection_are_each_judged(bench: Bench) -> None:
    good = f"GET http://127.0.0.1:{bench.port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    bad = b"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\n\r\n"
    said = await bench.say(good + good + bad)
    assert said.count(b"HTTP/1.1 200") == 2
    assert b"HTTP/1.1 403" in said
    assert [attempt.verdict for attempt in bench.told] == ["allowed", "allowed", "refused"]


async def test_connect_passes_bytes_on_as_they_are(bench: Bench) -> None:
    said = await bench.say(
        f"CONNECT 127.0.0.1:{bench.port} HTTP/1.1\r\nHost: x\r\n\r\n\x00\x01raw\r\n\r\n".encode()
    )
    assert said == b"HTTP/1.1 200 Connection established\r\n\r\n" + bench.server.says
    assert bench.server.heard == b"\x00\x01raw\r\n\r\n"


async def test_socks_connects_by_name_and_by_address(bench: Bench) -> None:
    port = bench.port.to_bytes(2, "big")
    for host in (b"\x01\x7f\x00\x00\x01", b"\x03\x09127.0.0.1"):
        bench.server.heard = b""
        said = await bench.say(b"\x05\x01\x00\x05\x01\x00" + host + port + b"hi\r\n\r\n")
        assert said == b"\x05\x00\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00" + bench.server.says
        assert bench.server.heard == b"hi\r\n\r\n"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (b"\x05\x01\x00\x05\x01\x00\x03\x0bother.local\x01\xbb", b"\x05\x00\x05\x02"),  # denied
        (b"\x05\x01\x00\x05\x02\x00\x01\x7f\x00\x00\x01\x00\x50", b"\x05\x00\x05\x07"),  # BIND
        (b"\x05\x01\x00\x05\x03\x00\x01\x7f\x00\x00\x01\x00\x50", b"\x05\x00\x05\x07"),  # UDP
        (b"\x05\x01\x00\x05\x01\x00\x09", b"\x05\x00"),
        (b"\x05\x01\x02", b"\x05\xff"),  # a password alone
        (b"\x05\x01\x00\x05\x01\x00\x03\x04a\r\nb\x01\xbb", b"\x05\x00\x05\x08"),
        (b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00", b"HTTP/1.1 400"),
    ],
)
async def test_socks_refuses_what_it_must(bench: Bench, asked: bytes, answer: bytes) -> None:
    said = await bench.say(asked)
    assert said.startswith(answer), said
    assert bench.server.heard == b""


SMUGGLED = [
    "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "Content-Length: 5, 6\r\n\r\nhello!",
    "Content-Length: +5\r\n\r\nhello",
    "Content-Length: -1\r\n\r\n",
    "Content-Length: 0x5\r\n\r\nhello",
    "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "Connection: content-length\r\nContent-Length: 5\r\n\r\nhello",
    "Connection: close, Host\r\n\r\n",
    "Host: two\r\n\r\n",
    "X\x00: y\r\n\r\n",
    "X: a\x00b\r\n\r\n",
    "X: a\rSmuggled: b\r\n\r\n",
    "X Y: z\r\n\r\n",
    ": empty\r\n\r\n",
    "X: " + "a" * 40_000 + "\r\n\r\n",
]


@pytest.mark.parametrize("rest", SMUGGLED, ids=range(len(SMUGGLED)))
async def test_a_request_that_can_be_read_in_two_ways_goes_nowhere(bench: Bench, rest: str) -> None:
    head = f"POST http://127.0.0.1:{bench.port}/ HTTP/1.1\r\nHost: x\r\n"
    said = await bench.say((head + rest).encode("latin-1"))
    assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 501")), said
    assert bench.server.heard == b""


@pytest.mark.parametrize(
    "line",
    [
        "GET / HTTP/1.1",
        "GET https://127.0.0.1:PORT/ HTTP/1.1",
        "GET ftp://127.0.0.1:PORT/ HTTP/1.1",
        "GET http://user@127.0.0.1:PORT/ HTTP/1.1",
        "GET http://127.0.0.1:PORT\\@other/ HTTP/1.1",
        "GET http://127.0.0.1:PORT#@other/ HTTP/1.1",
        "GET http://127.0.0.1:0PORT0/ HTTP/1.1",
        "GET http://127.0.0.1:/ HTTP/1.1",
        "GET http:///etc HTTP/1.1",
        "GET http://%31/ HTTP/1.1",
        "CONNECT 127.0.0.1 HTTP/1.1",
        "CONNECT http://127.0.0.1:PORT/ HTTP/1.1",
        "CONNECT 127.0.0.1:PORT/ HTTP/1.1",
        "CONNECT [::1 :PORT HTTP/1.1",
        "CONNECT [nonsense]:PORT HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "GET  http://127.0.0.1:PORT/ HTTP/1.1",
        "GET http://127.0.0.1:PORT/ HTTP/2.0",
        "GET http://127.0.0.1:PORT/",
    ],
)
async def test_a_target_that_is_not_plain_goes_nowhere(bench: Bench, line: str) -> None:
    said = await bench.say(f"{line}\r\nHost: x\r\n\r\n".replace("PORT", str(bench.port)).encode())
    assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 505")), said
    assert bench.server.heard == b""


async def test_a_refusal_can_be_read(bench: Bench) -> None:
    said = await bench.say(b"CONNECT other.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"proxy-status: cloche; error=http_request_denied; details=" in head
    assert body == b"Cloche: this machine's network policy does not allow other.example port 443.\n"


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nx: \x00\r\n\r\n",
    ],
)
async def test_a_server_that_talks_nonsense_is_told_as_such(bench: Bench, says: bytes) -> None:
    bench.server.says = says
    head = f"GET http://127.0.0.1:{bench.port}/ HTTP/1.1\r\nHost: x\r\n\r\n"

    async def greet_and_leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        writer.close()

    server = await asyncio.start_server(greet_and_leave, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bench.egress.change(settle(Network.model_validate([f"127.0.0.1:{port}"]), {}))
    said = await bench.say(head.replace(str(bench.port), str(port)).encode())
    server.close()
    assert said.startswith(b"HTTP/1.1 502"), said


async def test_who_is_slow_to_say_what_he_wants_is_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "HEAD_S", 0.3)
    for beginning in (b"", b"G", b"GET http://", b"\x05", b"\x05\x01\x00\x05"):
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        serving = asyncio.create_task(
            bench.egress._serve(await asyncio.open_unix_connection(sock=ours))
        )
        writer.write(beginning)
        async with asyncio.timeout(3):
            await reader.read()
            await serving
        writer.close()


async def test_bytes_beyond_the_limit_are_not_carried(bench: Bench) -> None:
    policy = settle(
        Network.model_validate({"allow": [f"127.0.0.1:{bench.port}"], "max_bytes": 1000}), {}
    )
    bench.egress.change(policy)
    connect = f"CONNECT 127.0.0.1:{bench.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    await bench.say(connect + b"x" * 5000)
    assert len(bench.server.heard) <= 1000
    said = await bench.say(connect)
    assert said.startswith(b"HTTP/1.1 403"), said
    assert [attempt.verdict for attempt in bench.told] == ["cut", "refused"]
