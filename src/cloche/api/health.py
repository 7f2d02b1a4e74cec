"""Whether the server lives, and whether it can do its work. Open to anyone who can reach it."""

from __future__ import annotations

from fastapi import APIRouter

from cloche.api.services import Use

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer as long as the process lives."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(services: Use) -> dict[str, object]:
    """Answer when jobs can be taken: the database is asked."""
    counts = await services.queue.counts()
    return {"status": "ready", "rung": services.rung, "jobs": counts}
