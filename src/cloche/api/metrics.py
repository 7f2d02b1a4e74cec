"""The server's numbers, for Prometheus. They tell of no tenant, but need a key all the same."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cloche.api.auth import Reader
from cloche.api.described import content
from cloche.api.services import Use

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    operation_id="readMetrics",
    response_class=Response,
    responses=content(
        "text/plain; version=0.0.4; charset=utf-8",
        '# TYPE cloche_jobs gauge\ncloche_jobs{state="running"} 2.0\n',
        schema={"type": "string"},
    ),
)
async def metrics(caller: Reader, services: Use) -> Response:
    """Tell every metric, in Prometheus's text format."""
    text = await services.vitals.scrape()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
