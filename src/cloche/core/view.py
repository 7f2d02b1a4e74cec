"""How a job looks from outside: to callers of the API, and to receivers of webhooks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from cloche.core.job import Job


def job_view(job: Job) -> dict[str, Any]:
    """The job as `/v1` tells it."""
    return {
        "id": job.id,
        "tenant": job.tenant,
        "state": job.state,
        "reason": job.reason,
        "exit_code": job.exit_code,
        "error": job.error or None,
        "rung": job.rung,
        "machine": job.machine or None,
        "attempt": job.attempt,
        "cancel_requested": job.cancel_requested,
        "created_at": moment(job.created_at),
        "started_at": moment(job.started_at),
        "finished_at": moment(job.finished_at),
        "request": job.request.model_dump(mode="json", exclude_defaults=True),
        "links": {
            "self": f"/v1/jobs/{job.id}",
            "events": f"/v1/jobs/{job.id}/events",
            "logs": f"/v1/jobs/{job.id}/logs",
            "artifacts": f"/v1/jobs/{job.id}/artifacts.zip",
            "files": f"/v1/jobs/{job.id}/files",
        },
    }


def moment(value: datetime | None) -> str | None:
    return None if value is None else value.isoformat()
