"""How a job looks from outside."""

from __future__ import annotations

from typing import Any

from cloche.core.job import Job, State
from cloche.core.record import Event
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
