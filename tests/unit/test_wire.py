"""What the guest may say, and what it may not."""

from __future__ import annotations

import json

import pytest

from cloche.core.errors import GuestMisbehaved
from cloche.sandbox import wire

EXIT = {
    "code": 3, "signal": None, "timed_out": False, "duration_s": 1.5, "cpu_s": 0, "max_rss_kib": 10,
}  # fmt: skip
STATUS = {
    "id": "0123456789abcdef", "pid": 7, "argv": ["sh", "-c", "ñ"], "pty": False, "started_at": 1.5,
    "stdout_bytes": 0, "stderr_bytes": 2, "exit": EXIT,
}  # fmt: skip
ENTRY = {"path": "/workspace/x", "kind": "file", "size": 3, "mode": 0o644, "modified_at": 1.25}


def parse(kind: type[wire.Wire], message: object) -> wire.Wire:
    return wire.parse(kind, json.dumps(message).encode())


def test_what_the_guest_says_is_understood() -> None:
    status = wire.parse(wire.StatusLine, json.dumps(STATUS).encode()).value()
    entry = wire.parse(wire.EntryLine, json.dumps(ENTRY).encode()).value()

    assert (status.id, status.argv, status.exit and status.exit.code) == (
        "0123456789abcdef", ("sh", "-c", "ñ"), 3,
    )  # fmt: skip
    assert (entry.path, entry.kind, entry.size) == ("/workspace/x", "file", 3)
    assert parse(wire.Done, {}) == wire.Done()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (wire.ExitLine, {"code": -1}),
        (wire.ExitLine, {"code": 256}),
        (wire.ExitLine, {"code": "3"}),
        (wire.ExitLine, {"code": 3.0}),
        (wire.ExitLine, {"code": True}),
        (wire.ExitLine, {"signal": 0}),
        (wire.ExitLine, {"signal": 65}),
        (wire.ExitLine, {"duration_s": -1}),
        (wire.ExitLine, {"duration_s": 1e300}),
        (wire.ExitLine, {"timed_out": 1}),
        (wire.ExitLine, {"extra": 1}),
        (wire.StatusLine, {"id": "../../etc/passwd"}),
        (wire.StatusLine, {"id": "0123456789abcdeF"}),
        (wire.StatusLine, {"id": "0123456789abcdef\n"}),
        (wire.StatusLine, {"pid": 0}),
        (wire.StatusLine, {"pid": 2**40}),
        (wire.StatusLine, {"argv": "sh"}),
        (wire.StatusLine, {"argv": [1]}),
        (wire.StatusLine, {"stdout_bytes": -1}),
        (wire.StatusLine, {"stdout_bytes": 2**63}),
        (wire.EntryLine, {"kind": "device"}),
        (wire.EntryLine, {"mode": 0o10000}),
        (wire.EntryLine, {"path": "x" * 20_000}),
    ],
)
def test_what_it_never_would_say_is_refused(
    kind: type[wire.Wire], change: dict[str, object]
) -> None:
    base = {wire.ExitLine: EXIT, wire.StatusLine: STATUS, wire.EntryLine: ENTRY}[kind]  # type: ignore[index]
    parse(kind, base)

    with pytest.raises(GuestMisbehaved):
        parse(kind, {**base, **change})


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"null", b"[]", b"{", b"\xff", b'{"code": NaN}', b'"\\ud800"', b"[" * 100_000,
        b'{"a":' * 10_000, b'{"code": 1' + b"0" * 10_000 + b"}", b'{"duration_s": Infinity}',
    ],
)  # fmt: skip
def test_what_is_not_even_a_message_is_refused(raw: bytes) -> None:
    for kind in (wire.ExitLine, wire.Done, wire.ProcessesLine):
        with pytest.raises(GuestMisbehaved):
            wire.parse(kind, raw)


def test_a_refusal_shows_nothing_that_the_guest_chose() -> None:
    sly = {**EXIT, "\x1b[31m\n<script>" * 100: 1}

    with pytest.raises(GuestMisbehaved) as caught:
        parse(wire.ExitLine, sly)

    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000


def test_text_from_inside_is_cleaned_and_cut() -> None:
    assert wire.clean("fine ñ 🪴") == "fine ñ 🪴"
    assert wire.clean("\x1b]0;title\x07\r\n") == "\ufffd]0;title\ufffd\ufffd\ufffd"
    assert wire.clean("x" * 1000, 10) == "x" * 10 + "…"
