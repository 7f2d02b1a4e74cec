"""Server-sent events, as every stream of ours writes them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

from fastapi import Request
from fastapi.responses import StreamingResponse

from cloche.core.errors import ClocheError

PING_S: Final = 15.0


def wanted(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def line(event: str, data: Mapping[str, Any], event_id: str | int | None = None) -> str:
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {event}\ndata: {json.dumps(data)}\n\n"


def response(stream: AsyncGenerator[str, None]) -> StreamingResponse:
    # The second header keeps a proxy such as nginx from holding events back.
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_pinged(stream), headers=headers, media_type="text/event-stream")


async def _pinged(stream: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """Break a stream's silence now and then, so that nobody on the way takes it for dead."""
    async with contextlib.aclosing(stream):
        waiting = asyncio.ensure_future(anext(stream, None))
        try:
            while True:
                await asyncio.wait((waiting,), timeout=PING_S)
                if not waiting.done():
                    yield ": still here\n\n"
                    continue
                text = waiting.result()
                if text is None:
                    return
                yield text
                waiting = asyncio.ensure_future(anext(stream, None))
        finally:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClocheError):
                await waiting
