"""Follower: no gap, no repeat, one end."""

from __future__ import annotations

import base64

import pytest

from cloche.core.errors import GuestMisbehaved
from cloche.core.process import Chunk
from cloche.sandbox import wire
from cloche.sandbox.process import Follower

END = wire.ExitLine(code=0, signal=None, timed_out=False, duration_s=0, cpu_s=0, max_rss_kib=0)


def line(offset: int, data: bytes, *, lost: int = 0, stream: str = "stdout") -> wire.OutputLine:
    return wire.OutputLine(
        stream=stream,  # type: ignore[arg-type]
        offset=offset,
        lost=lost,
        data=base64.b64encode(data).decode(),
    )


def follower(stdout: int = 0, stderr: int = 0) -> Follower:
    return Follower({"stdout": stdout, "stderr": stderr})


def test_bytes_in_order_become_chunks() -> None:
    follows = follower(stdout=5)

    assert follows.take(line(5, b"abc")) == Chunk(stream="stdout", offset=5, data=b"abc")
    assert follows.take(line(8, b"d")) == Chunk(stream="stdout", offset=8, data=b"d")
    assert follows.take(line(0, b"e", stream="stderr")) == Chunk(
        stream="stderr", offset=0, data=b"e"
    )


def test_what_was_lost_is_told_and_counted() -> None:
    follows = follower()

    chunk = follows.take(line(100, b"abc", lost=100))

    assert chunk == Chunk(stream="stdout", offset=100, data=b"abc", lost=100)
    assert follows.take(line(103, b"d")) is not None


@pytest.mark.parametrize(
    ("offset", "lost", "kind"),
    [(4, 0, "gap"), (2, 0, "repeat"), (0, 0, "start again"), (3, 1, "gap of another size")],
)
def test_a_gap_or_a_repeat_is_a_lie(offset: int, lost: int, kind: str) -> None:
    follows = follower()
    follows.take(line(0, b"abc"))

    with pytest.raises(GuestMisbehaved):
        follows.take(line(offset, b"d", lost=lost))


@pytest.mark.parametrize("data", ["A", "A===", "****", "QQ==QQ==", "Q Q=", "QQ==\n", "ÄÄÄÄ"])
def test_what_is_not_base64_is_a_lie(data: str) -> None:
    with pytest.raises(GuestMisbehaved):
        follower().take(wire.OutputLine(stream="stdout", data=data))


def test_nothing_follows_the_end() -> None:
    follows = follower()
    assert follows.take(wire.OutputLine(exit=END)) is None

    for after in (line(0, b"abc"), wire.OutputLine(alive=True), wire.OutputLine(exit=END)):
        with pytest.raises(GuestMisbehaved, match="after the end"):
            follows.take(after)


def test_the_end_is_known_only_once_it_was_told() -> None:
    follows = follower()
    follows.take(line(0, b"abc"))
    with pytest.raises(GuestMisbehaved, match="ends before"):
        follows.ended()

    follows.take(wire.OutputLine(exit=END))

    assert follows.ended() == END.value()


def test_a_sign_of_life_is_not_output() -> None:
    assert follower().take(wire.OutputLine(alive=True)) is None
