"""Sees every request: gives it an id, a span, a count and a line in the log."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.api import problems
from cloche.core import about, tracing
from cloche.core.meters import Meters

logger = logging.getLogger(__name__)

_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_UNTRACED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Asked every few seconds by machines, and about nothing."""
OTHER: Final = "other"


class Observed:
    """Stands around the whole app. A request is known by its route, never by its path."""

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        about.begin(request_id=_id(headers.get("x-request-id", "")))
        if scope["path"] in _UNTRACED:
            await self._answer(scope, receive, send)
            return
        with tracing.request(scope["method"], headers.get("traceparent")) as span:
            status = await self._answer(scope, receive, send)
            tracing.note_answer(span, scope["method"], route_of(scope), status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Have the app answer; return the status."""
        began = time.monotonic()
        status = 0

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = about.facts()["request_id"]
                self._tell(scope, status, time.monotonic() - began)
            await send(message)

        try:
            await self._app(scope, receive, observe)
        except ClientDisconnect:
            logger.debug("the caller hung up before it had sent its request")
        except Exception:
            if status:  # Half an answer is out: the server hangs up, and logs why.
                raise
            logger.exception("a fault of ours")
            await problems.fault()(scope, receive, observe)
        return status

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        route, method = route_of(scope), scope["method"]
        self._meters.request_answered(route, method, status, seconds)
        logger.debug("%s %s: %d in %.1f ms", method, route, status, seconds * 1000)


def route_of(scope: Scope) -> str:
    """Return the template of the path that was asked for; all unknown ones are one."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else OTHER


def _id(given: str) -> str:
    return given if _ID.fullmatch(given) else secrets.token_hex(8)
