"""The guest's end of the channel: HTTP as the host's library speaks it, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.guest.http import Exchange, Refusal

HEAD = b"POST / HTTP/1.1\r\nhost: guest\r\n"


@asynccontextmanager
async def arriving(*pieces: bytes) -> AsyncIterator[tuple[Exchange, asyncio.StreamReader]]:
    """Yield the exchange of a request that comes in `pieces`, and what reads its answer."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[Exchange] = loop.create_future()

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(Exchange(reader, writer))

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    exchange = await accepted
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.write_eof()
        yield exchange, reader
    finally:
        exchange.stop_heartbeat()
        exchange.writer.close()
        writer.close()
        server.close()


async def body_of(*pieces: bytes) -> bytes:
    async with arriving(*pieces) as (exchange, _):
        assert await exchange.receive()
        return b"".join([data async for data in exchange.body()])


def sent(client: h11.Connection, events: Iterable[h11.Event]) -> bytes:
    return b"".join(client.send(event) or b"" for event in events)


def cut(raw: bytes, at: Iterable[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(raw) + 1) for place in at), len(raw)]
    return [raw[one:other] for one, other in itertools.pairwise(places)]


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=200), max_size=5),
    query=st.dictionaries(st.text(min_size=1, max_size=9), st.text(max_size=30), max_size=4),
    chunked=st.booleans(),
    cuts=st.lists(st.integers(0, 5000), max_size=6),
)
def test_what_the_hosts_library_sends_is_understood(
    pieces: list[bytes], query: dict[str, str], chunked: bool, cuts: list[int]
) -> None:
    length = str(sum(map(len, pieces)))
    kind = ("transfer-encoding", "chunked") if chunked else ("content-length", length)
    target = f"/files?{urlencode(query, quote_via=quote)}" if query else "/files"
    raw = sent(
        h11.Connection(h11.CLIENT),
        [
            h11.Request(method="PUT", target=target, headers=[("Host", "guest"), kind]),
            *(h11.Data(data=piece) for piece in pieces),
            h11.EndOfMessage(),
        ],
    )

    async def take() -> tuple[str, str, dict[str, str], bytes]:
        async with arriving(*cut(raw, cuts)) as (exchange, _):
            assert await exchange.receive()
            body = b"".join([data async for data in exchange.body()])
            return exchange.method, exchange.path, exchange.query, body

    assert asyncio.run(take()) == ("PUT", "/files", query, b"".join(pieces))


async def test_answers_are_understood_by_the_hosts_library() -> None:
    client = h11.Connection(h11.CLIENT)
    request = sent(client, [h11.Request(method="GET", target="/", headers=[("host", "guest")])])
    lines: list[dict[str, Any]] = [{"started": 1}, {"data": "ü" * 9}, {"exit": None}]

    async with arriving(request) as (exchange, reader):
        assert await exchange.receive()
        exchange.beat()
        await exchange.begin_lines(lines[0])
        await exchange.send(b"")
        for line in lines[1:]:
            await exchange.line(line)
        await exchange.end()
        exchange.writer.close()
        client.send(h11.EndOfMessage())
        client.receive_data(await reader.read())

    beat, head = client.next_event(), client.next_event()
    assert isinstance(beat, h11.InformationalResponse)
    assert beat.status_code == 102
    assert isinstance(head, h11.Response)
    assert (b"content-type", b"application/x-ndjson") in head.headers
    body = b""
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert list(map(json.loads, body.splitlines())) == lines


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET x HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1 \r\n\r\n",
        b" GET / HTTP/1.1\r\n\r\n",
        b"GET /\xc3\xbc HTTP/1.1\r\n\r\n",
        b"GET /?path=%4 HTTP/1.1\r\n\r\n",
        b"GET /?path=%+1 HTTP/1.1\r\n\r\n",
        b"GET /?path=%ff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nhost: guest\r\n\r\n",
        HEAD + b"folded: a\r\n b\r\n\r\n",
        HEAD + b"no colon\r\n\r\n",
        HEAD + b"space : x\r\n\r\n",
        HEAD + b": x\r\n\r\n",
        HEAD + b"a: b\nc: d\r\n\r\n",
        HEAD + b"a: b\x00\r\n\r\n",
        HEAD + b"Host: other\r\n\r\n",
        HEAD + b"content-length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: +1\r\n\r\n",
        HEAD + b"content-length: 1_0\r\n\r\n",
        HEAD + "content-length: ¹\r\n\r\n".encode("latin-1"),
        HEAD + b"content-length: \r\n\r\n",
        HEAD + b"content-length: " + b"9" * 19 + b"\r\n\r\n",
        HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n",
        HEAD + b"transfer-encoding: Chunked\r\n\r\n",
        HEAD + b"half",
        HEAD + b"long: " + b"x" * 200_000,
    ],
)
async def test_a_head_that_the_host_never_sends_is_refused(head: bytes) -> None:
    async with arriving(head) as (exchange, _):
        with pytest.raises(Refusal) as caught:
            await exchange.receive()

    assert caught.value.code == "bad_request"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"5\r\nhel",
        b"5\r\nhello",
        b"5\r\nhello world\r\n0\r\n\r\n",
        b"5;x=y\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"\r\nhello\r\n0\r\n\r\n",
        b"000000005\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\n",
        b"5\r\nhello\r\n0\r\nx: y\r\n\r\n",
        b"5\r\nhello\r\n0\r\n",
        b"5" * 200_000,
    ],
)
async def test_chunks_that_the_host_never_sends_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        await body_of(HEAD + b"transfer-encoding: chunked\r\n\r\n", body)

    assert caught.value.code == "bad_request"


async def test_a_body_that_ends_early_is_refused() -> None:
    with pytest.raises(Refusal) as caught:
        await body_of(HEAD + b"content-length: 6\r\n\r\nhello")

    assert caught.value.code == "bad_request"


async def test_a_peer_that_says_nothing_is_no_request() -> None:
    async with arriving() as (exchange, _):
        assert not await exchange.receive()


async def test_what_follows_an_upgrade_is_left_to_the_tunnel() -> None:
    head = b"GET /tunnel HTTP/1.1\r\nconnection: upgrade\r\nupgrade: tunnel\r\n\r\n"
    async with arriving(head + b"early") as (exchange, reader):
        assert await exchange.receive()
        await exchange.switch()

        assert await exchange.reader.read(100) == b"early"
        assert (await reader.readline()).startswith(b"HTTP/1.1 101 ")
