"""The ASGI application: routes, problems, and a bound on what is sent in."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche import __version__
from cloche.api import classic, health, jobs, keys, metrics, problems, sandboxes, webhooks
from cloche.api.observed import Observed
from cloche.api.services import Services
from cloche.core.errors import RequestTooLarge
from cloche.core.job import Request

BODY_BYTES: Final = 16 * 1024 * 1024
ROUTERS: Final = (
    classic.router,
    jobs.router,
    sandboxes.router,
    webhooks.router,
    keys.router,
    health.router,
    metrics.router,
)


def create_app(services: Services) -> FastAPI:
    app = FastAPI(
        title="Cloche",
        version=__version__,
        description="Run coding agents, and the code they write, under glass.",
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(BoundedBody, limit=BODY_BYTES)
    # The last one added is the outermost, and sees what the others do.
    app.add_middleware(Observed, meters=services.vitals.meters)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Add the job's schema, which the routes read by hand, to the API's description."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        described = original()
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        whole = Request.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= whole.pop("$defs", {})
        schemas["JobRequest"] = whole
        return described

    app.openapi = openapi  # type: ignore[method-assign]


class BoundedBody:
    """Refuses a body that is larger than any call needs, as soon as that shows."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise _TooLarge
            return message

        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        try:
            if sizes and sizes[0].isdigit() and int(sizes[0][:20]) > self._limit:
                raise _TooLarge
            await self._app(scope, bounded, send)
        except _TooLarge:
            error = RequestTooLarge(
                f"The request's body is larger than {self._limit} bytes.",
                remedy="Send large files on their own, not inside a job.",
            )
            await problems.problem(error)(scope, receive, send)


class _TooLarge(Exception):
    """More was sent than is taken."""
