"""A bound on what is sent in: small for calls, larger for the few that take files."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.api import problems
from cloche.core.errors import RequestTooLarge

BODY_BYTES: Final = 16 * 1024 * 1024
FILE_ROUTES: Final = re.compile(r"/v1/uploads|/v1/(sandboxes|jobs)/[^/]+/files(/archive)?")
"""The paths that take whole files as bodies. Their routes must stream, never `await body()`."""


class BoundedBody:
    """Refuses a body that is larger than the call needs, as soon as that shows."""

    def __init__(self, app: ASGIApp, limit: int, *, of_files: int) -> None:
        self._app = app
        self._limit = limit
        self._of_files = of_files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._of_files if FILE_ROUTES.fullmatch(scope["path"]) else self._limit
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _TooLarge
            return message

        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        try:
            if sizes and sizes[0].isdigit() and int(sizes[0][:20]) > limit:
                raise _TooLarge
            await self._app(scope, bounded, send)
        except _TooLarge:
            await problems.problem(self._refusal(limit))(scope, receive, send)

    def _refusal(self, limit: int) -> RequestTooLarge:
        said = f"The request's body is larger than {limit} bytes."
        if limit == self._limit:
            return RequestTooLarge(
                said, remedy="Send large files to /v1/uploads, not inside a request."
            )
        return RequestTooLarge(said, remedy="Send less, or raise CLOCHE_MAX_UPLOAD_MIB.")


class _TooLarge(Exception):
    """More was sent than is taken."""
