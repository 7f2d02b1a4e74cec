"""Whether the server lives, and whether it can do its work. Open to anyone who can reach it."""

from __future__ import annotations

import time
from typing import Final

from fastapi import APIRouter

from cloche.api.answers.health import Alive, Ready
from cloche.api.described import OPEN, answer
from cloche.api.services import Use
from cloche.core.errors import NotReady

router = APIRouter(tags=["health"])

SILENT_S: Final = 30.0
"""A worker that has not looked at the queue for so long has lost its leases, too."""


@router.get("/healthz", operation_id="isAlive", responses=answer(Alive), openapi_extra=OPEN)
async def healthz() -> dict[str, str]:
    """Answer as long as the process lives."""
    return {"status": "ok"}


@router.get("/readyz", operation_id="isReady", responses=answer(Ready), openapi_extra=OPEN)
async def readyz(services: Use) -> dict[str, object]:
    """Answer when jobs can be taken in: the database is asked, and a worker here looked at."""
    vitals = services.vitals
    counts = await vitals.census.counts()
    return {
        "status": "ready",
        "rung": services.rung,
        "jobs": counts,
        "pool": {"ready": vitals.pool_ready()} if vitals.pool_ready else None,
        "worker": _worker(vitals.worker_looked_at()) if vitals.worker_looked_at else None,
    }


def _worker(looked_at: float) -> dict[str, object]:
    silent_s = time.monotonic() - looked_at
    if silent_s > SILENT_S:
        raise NotReady(
            f"The worker has not looked at the queue for {silent_s:.0f} s.",
            remedy="Look into the server's log, and restart it; running jobs go on.",
        )
    return {"alive": True, "silent_s": round(silent_s, 3)}
