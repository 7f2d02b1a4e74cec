"""Which bytes a Range header asks for."""

from __future__ import annotations

import pytest

from cloche.api import ranges
from cloche.core.errors import RangeRefused


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=0-3", (0, 4)),
        (" bytes=2- ", (2, 10)),
        ("bytes=-4", (6, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=9-999999999999999999", (9, 10)),
        ("bytes=0-10", (0, 10)),
        # Malformed, several, or of another unit: the whole is sent.
        ("bytes=-", None),
        ("bytes=5-4", None),
        ("bytes=a-b", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=" + "9" * 400 + "-", None),
        ("bytes=٣-٤", None),
        ("", None),
    ],
)
def test_a_range_is_read(header: str | None, part: tuple[int, int] | None) -> None:
    assert ranges.parse(header, 10) == part


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=99-100", 10), ("bytes=-0", 10), ("bytes=0-", 0)]
)
def test_a_range_behind_the_end_is_refused(header: str, size: int) -> None:
    with pytest.raises(RangeRefused):
        ranges.parse(header, size)
