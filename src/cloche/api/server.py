"""The ASGI application: routes, problems, and a bound on what is sent in."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI

from cloche import __version__
from cloche.api import (
    artifacts,
    classic,
    connections,
    described,
    health,
    jobs,
    keys,
    login,
    metrics,
    page,
    problems,
    sandboxes,
    tenants,
    uploads,
    webhooks,
)
from cloche.api.bodies import BODY_BYTES, BoundedBody
from cloche.api.observed import Observed
from cloche.api.services import Services

_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
ROUTERS: Final = (
    classic.router,
    jobs.router,
    artifacts.router,
    connections.router,
    uploads.router,
    sandboxes.router,
    webhooks.router,
    keys.router,
    health.router,
    tenants.router,
    login.router,
    page.router,
    metrics.router,
)


def create_app(services: Services) -> FastAPI:
    app = _routed()
    app.state.services = services
    app.add_middleware(BoundedBody, limit=BODY_BYTES, of_files=services.max_upload_bytes)
    # The last one added is the outermost, and sees what the others do.
    app.add_middleware(Observed, meters=services.vitals.meters)
    return app


def description() -> dict[str, Any]:
    """Return the API's OpenAPI description, which needs no server."""
    return _routed().openapi()


def _routed() -> FastAPI:
    app = FastAPI(
        title="Cloche",
        version=__version__,
        description="Run coding agents, and the code they write, under glass.",
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
        responses=described.PROBLEMS,
    )
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Add to the API's description what FastAPI cannot tell by itself."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        whole = original()
        described.finish(whole)
        whole["components"]["securitySchemes"] = _KEYS
        whole["security"] = [{name: []} for name in _KEYS]
        return whole

    app.openapi = openapi  # type: ignore[method-assign]
