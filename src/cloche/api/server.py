"""The ASGI application: routes, problems, and a bound on what is sent in."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI

from cloche import __version__
from cloche.api import (
    artifacts,
    classic,
    connections,
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
from cloche.core.job import Request

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
    app.add_middleware(BoundedBody, limit=BODY_BYTES, of_files=services.max_upload_bytes)
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
