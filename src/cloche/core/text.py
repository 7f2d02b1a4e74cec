"""Text that comes in pieces."""

from __future__ import annotations

_LONGEST = 4


def whole_length(data: bytes) -> int:
    """Return how much of `data` can be shown: all but a character whose rest is yet to come.

    Bytes that are no UTF-8 at all are not held back.
    """
    for back in range(1, min(_LONGEST, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return len(data)
        if byte >= 0xC0:  # A character begins here.
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 1
            return len(data) - back if size > back else len(data)
    return len(data)
