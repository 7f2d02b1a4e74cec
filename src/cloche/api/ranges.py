"""Answers with the whole of something, or with the range of it that was asked for (RFC 9110)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from cloche.api import problems
from cloche.core.errors import RangeRefused

_ONE_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")

Read = Callable[[int, int], AsyncIterator[bytes]]
"""Yields the bytes from the first number up to, not including, the second."""


def answer(
    request: Request, read: Read, *, size: int, tag: str | None, headers: Mapping[str, str]
) -> Response:
    """Answer a GET or HEAD. `headers` are those of the content itself, its type among them."""
    about = {"accept-ranges": "bytes", **({"etag": f'"{tag}"'} if tag else {})}
    try:
        part = None if _is_outdated(request, tag) else parse(request.headers.get("range"), size)
    except RangeRefused as error:
        refusal = problems.problem(error)
        refusal.headers.update({**about, "content-range": f"bytes */{size}"})
        return refusal
    start, stop = part or (0, size)
    about |= {**headers, "content-length": str(stop - start)}
    if part is not None:
        about["content-range"] = f"bytes {start}-{stop - 1}/{size}"
    status = 200 if part is None else 206
    if request.method == "HEAD":
        return Response(status_code=status, headers=about)
    return StreamingResponse(read(start, stop), status, about)


def parse(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the range that a header asks for, or None for the whole.

    A header that is malformed, or asks for several ranges, is as good as none.

    Raises:
        RangeRefused: it lies behind the end.
    """
    match = _ONE_RANGE.fullmatch(header.strip()) if header else None
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        start, stop = max(0, size - int(match[2])), size
    else:
        start, stop = int(match[1]), min(int(match[2] or size) + 1, size)
        if match[2] and int(match[2]) < start:
            return None
    if start >= stop:
        raise RangeRefused(
            f"The range lies behind the end, at {size} bytes.", remedy="Ask for an earlier one."
        )
    return start, stop


def _is_outdated(request: Request, tag: str | None) -> bool:
    """Tell whether the caller has the start of another version than this."""
    known = request.headers.get("if-range")
    return known is not None and (tag is None or known != f'"{tag}"')
