"""How a job looks from outside."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cloche.core.job import Job, State
from cloche.core.record import Event
from cloche.core.standing import Standing
from cloche.core.view import moment

TAIL_BYTES = 64 * 1024
_CLASSIC = {
    State.QUEUED: "pending",
    State.RUNNING: "running",
    State.SUCCEEDED: "complete",
    State.FAILED: "error",
    State.CANCELLED: "error",
}


def classic_view(job: Job, stdout: str, stderr: str) -> dict[str, Any]:
    """The job in the words that classic clients read."""
    download = f"/v1/jobs/{job.id}/artifacts.zip" if job.state.final else None
    return {
        "job_id": job.id,
        "task_id": job.id,
        "state": job.state,
        "status": _CLASSIC[job.state],
        "reason": job.reason,
        "exit_code": job.exit_code,
        "error": job.error or None,
        "stdout": stdout,
        "stderr": stderr,
        "logs": f"/v1/jobs/{job.id}/logs",
        "rung": job.rung,
        "created_at": moment(job.created_at),
        "started_at": moment(job.started_at),
        "finished_at": moment(job.finished_at),
        "result": download,
        "download_url": download,
    }


def sandbox_view(standing: Standing) -> dict[str, Any]:
    size = asdict(standing.spec)
    return {
        "id": standing.id,
        "tenant": standing.tenant,
        "state": standing.condition,
        "reason": standing.ending,
        "rung": standing.rung,
        "host": standing.home,
        "image": size.pop("image"),
        "limits": size,
        # Their values may be secrets.
        "env": sorted(standing.env),
        "labels": dict(standing.labels),
        "job": standing.job or None,
        "idle_s": standing.idle_s,
        "created_at": moment(standing.created_at),
        "used_at": moment(standing.used_at),
        "expires_at": moment(standing.expires_at),
        "ended_at": moment(standing.ended_at),
    }


def event_view(event: Event) -> dict[str, Any]:
    view = {
        "seq": event.seq,
        "at": moment(event.at),
        "kind": event.kind,
        "body": dict(event.body),
    }
    if event.data:
        view["text"] = event.data.decode(errors="replace")
        view["log_offset"] = event.log_offset
    return view
