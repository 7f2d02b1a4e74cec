"""Whatever the guest sends becomes a value, or GuestMisbehaved: nothing else, ever."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.core.errors import ClocheError, GuestMisbehaved
from cloche.sandbox import wire
from cloche.sandbox.process import Follower
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.fakes import LyingMachine, answer

KINDS = [kind for kind in vars(wire).values() if isinstance(kind, type)]
MESSAGES: list[type[wire.Wire]] = [
    kind for kind in KINDS if issubclass(kind, wire.Wire) and kind is not wire.Wire
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["stdout", "file", "created", "0" * 16, "AAAA"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=12,
)


def near(kind: type[wire.Wire]) -> st.SearchStrategy[dict[str, Any]]:
    """Messages with the right names and anything for their values."""
    names = st.sampled_from([*kind.model_fields, "surprise"])
    return st.dictionaries(names, values)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_understood_or_refused(kind: type[wire.Wire], data: st.DataObject) -> None:
    raw = data.draw(
        st.binary(max_size=200)
        | st.text(max_size=50).map(str.encode)
        | values.map(lambda value: json.dumps(value).encode())
        | near(kind).map(lambda value: json.dumps(value).encode())
    )
    try:
        message = wire.parse(kind, raw)
    except GuestMisbehaved as error:
        assert error.message.isprintable()  # noqa: PT017
        return
    if isinstance(message, wire.ExitLine | wire.StatusLine | wire.EntryLine | wire.WatchLine):
        message.value()


def lines_of(written: list[tuple[str, bytes]]) -> list[wire.OutputLine]:
    """Say it as an honest guest would."""
    offsets = {"stdout": 0, "stderr": 0}
    lines = []
    for stream, data in written:
        lines.append(_line(stream, offsets[stream], data))
        offsets[stream] += len(data)
    return lines


def _line(stream: str, offset: int, data: bytes) -> wire.OutputLine:
    text = base64.b64encode(data).decode()
    return wire.OutputLine.model_validate({"stream": stream, "offset": offset, "data": text})


written = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(min_size=1, max_size=20)), min_size=1
)


@given(written=written)
def test_honest_output_comes_through_whole(written: list[tuple[str, bytes]]) -> None:
    follower = Follower({"stdout": 0, "stderr": 0})

    chunks = [follower.take(line) for line in lines_of(written)]

    assert [(chunk.stream, chunk.data) for chunk in chunks if chunk] == written


@given(written=written, data=st.data())
def test_no_dropped_repeated_or_shifted_line_goes_unnoticed(
    written: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    lines = lines_of(written)
    place = data.draw(st.integers(0, len(lines) - 1))
    victim = lines[place]
    harm = data.draw(st.sampled_from(["drop", "repeat", "shift"]))
    if harm == "drop":
        if all(line.stream != victim.stream for line in lines[place + 1 :]):
            return  # The very last one of a stream: the exit line's business, not the follower's.
        del lines[place]
    elif harm == "repeat":
        lines.insert(place, victim)
    else:
        lines[place] = victim.model_copy(update={"offset": victim.offset + 1})
    follower = Follower({"stdout": 0, "stderr": 0})

    with pytest.raises(GuestMisbehaved):
        list(map(follower.take, lines))


@given(lines=st.lists(near(wire.OutputLine), max_size=5))
@settings(max_examples=200, deadline=None)
def test_a_follower_takes_any_message_or_refuses_it(lines: list[dict[str, Any]]) -> None:
    follower = Follower({"stdout": 0, "stderr": 0})
    try:
        for line in lines:
            follower.take(wire.parse(wire.OutputLine, json.dumps(line).encode()))
        follower.ended()
    except GuestMisbehaved as error:
        assert error.message.isprintable()  # noqa: PT017


@given(data=st.text(max_size=8))
def test_a_follower_takes_base64_or_refuses_it(data: str) -> None:
    line = wire.OutputLine(stream="stdout", data=data)
    try:
        chunk = Follower({"stdout": 0, "stderr": 0}).take(line)
    except GuestMisbehaved:
        return
    assert chunk is not None
    assert base64.b64encode(chunk.data).decode() == data


pieces = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 400 No\r\n", b"HTTP/1.1 101 Switch\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 204 None\r\n",
        b"content-length: 5\r\n", b"content-length: 0\r\n", b"transfer-encoding: chunked\r\n",
        b"connection: close\r\n", b"upgrade: tunnel\r\n", b"x-file-size: 12\r\n", b"\r\n",
        b"5\r\nhello\r\n", b"0\r\n\r\n", b"{}", b"{}\n", b'{"alive": true}\n', b"null\n", b"\0",
        answer({"protocol": 1, "uptime_s": 0}), answer({"code": "no_such_file", "message": ""}),
    ]
)  # fmt: skip


@given(says=st.lists(pieces | st.binary(max_size=20), max_size=12).map(b"".join))
@settings(max_examples=150, deadline=None)
async def test_no_answer_of_a_guest_surprises_the_host(says: bytes) -> None:
    machine = LyingMachine(says=says)
    sandbox = Sandbox(machine)
    try:
        for call in (
            sandbox.hello, sandbox.processes, lambda: sandbox.exec(["x"]),
            lambda: sandbox.exec(["x"], stdin=b"y"), lambda: sandbox.files.read("x"),
            lambda: sandbox.files.list("x"), lambda: sandbox.files.write("x", b"y"),
            lambda: sandbox.files.grep("x"), lambda: sandbox.attach("0" * 16), _tunnel(sandbox),
        ):  # fmt: skip
            try:
                await call()
            except ClocheError as error:
                assert error.message.isprintable()  # noqa: PT017
    finally:
        await machine.destroy()


def _tunnel(sandbox: Sandbox) -> Any:
    async def call() -> None:
        _, writer = await sandbox.tunnel(port=80)
        writer.close()

    return call
