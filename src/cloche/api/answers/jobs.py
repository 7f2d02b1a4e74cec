"""Jobs, as both dialects tell of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

from pydantic import ConfigDict

from cloche.api.described import Answer, example
from cloche.core import job, record
from cloche.core.job import Reason, State
from cloche.core.rung import Rung

ID: Final = "5f0c2a9be1d34c77"
CURSOR: Final = "WzE3NzI0NDI5MDQxMjA1MTgsICI1ZjBjMmE5YmUxZDM0Yzc3Il0="
_CREATED: Final = "2026-03-02T09:15:04.120518+00:00"
_STARTED: Final = "2026-03-02T09:15:04.131207+00:00"
_FINISHED: Final = "2026-03-02T09:15:04.402911+00:00"
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "code": {"kind": "python", "code": "print(6*7)"},
    "steps": {
        "steps": [
            {"tool": "shell", "command": "echo hello > hello.txt"},
            {"tool": "python", "code": "print(open('hello.txt').read())"},
        ],
        "files": [{"path": "notes.txt", "content": "Keep it short."}],
        "limits": {"memory_mib": 1024, "wall_s": 600},
        "labels": {"team": "blue"},
        "idempotency_key": "nightly-2026-03-02",
    },
    "task": {"task": "Build me a todo app in React"},
}


class JobRequest(job.Request):
    """One job: a task in plain words, or code, or steps; and how to run it."""

    model_config = ConfigDict(json_schema_extra={"examples": list(REQUESTS.values())})


class Scheduled(Answer):
    """A job was accepted; both ids are the same."""

    model_config = example({"job_id": ID, "task_id": ID})

    job_id: str
    task_id: str


class ClassicStatus(Answer):
    """How a job is doing, in the words that classic clients read."""

    model_config = example(
        {
            "job_id": ID,
            "task_id": ID,
            "state": "succeeded",
            "status": "complete",
            "reason": "done",
            "exit_code": 0,
            "error": None,
            "stdout": "42\n",
            "stderr": "",
            "logs": f"/v1/jobs/{ID}/logs",
            "rung": "container",
            "created_at": _CREATED,
            "started_at": _STARTED,
            "finished_at": _FINISHED,
            "result": f"/v1/jobs/{ID}/artifacts.zip",
            "download_url": f"/v1/jobs/{ID}/artifacts.zip",
        }
    )

    job_id: str
    task_id: str
    state: State
    status: Literal["pending", "running", "complete", "error"]
    reason: Reason | None
    exit_code: int | None
    error: str | None
    stdout: str
    """The last 64 KiB."""
    stderr: str
    """The last 64 KiB."""
    logs: str
    rung: Rung | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    result: str | None
    """Where to download what the job left, once it has ended."""
    download_url: str | None


class JobLinks(Answer):
    """Where more is told of a job."""

    self: str
    events: str
    logs: str
    artifacts: str
    files: str


JOB: Final[dict[str, Any]] = {
    "id": ID,
    "tenant": "default",
    "state": "succeeded",
    "reason": "done",
    "exit_code": 0,
    "error": None,
    "rung": "container",
    "machine": "3fa9c1d20b77",
    "attempt": 1,
    "cancel_requested": False,
    "created_at": _CREATED,
    "started_at": _STARTED,
    "finished_at": _FINISHED,
    "request": REQUESTS["code"],
    "links": {
        "self": f"/v1/jobs/{ID}",
        "events": f"/v1/jobs/{ID}/events",
        "logs": f"/v1/jobs/{ID}/logs",
        "artifacts": f"/v1/jobs/{ID}/artifacts.zip",
        "files": f"/v1/jobs/{ID}/files",
    },
}


class Job(Answer):
    """A job, and what has become of it."""

    model_config = example(JOB)

    id: str
    tenant: str
    state: State
    reason: Reason | None
    exit_code: int | None
    error: str | None
    """A sentence for people, when it failed."""
    rung: Rung | None
    machine: str | None
    attempt: int
    """How often a worker has taken it up."""
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    request: JobRequest
    """As it was sent; what is left out has its default."""
    links: JobLinks


class Jobs(Answer):
    """A page of jobs, newest first."""

    model_config = example({"jobs": [JOB], "next_cursor": CURSOR})

    jobs: list[Job]
    next_cursor: str | None
    """Send it as `cursor` for the next page; null on the last one."""


_EVENTS: Final[list[dict[str, Any]]] = [
    {"seq": 4, "at": _STARTED, "kind": "step", "body": {"step": 0, "tool": "python"}},
    {
        "seq": 5,
        "at": _FINISHED,
        "kind": "output",
        "body": {"step": 0, "stream": "stdout", "offset": 0},
        "text": "42\n",
        "log_offset": 0,
    },
]
EVENT_STREAM: Final = (
    "id: 5\n"
    "event: output\n"
    f'data: {{"seq": 5, "at": "{_FINISHED}", "kind": "output", "body": {{"step": 0, '
    '"stream": "stdout", "offset": 0}, "text": "42\\n", "log_offset": 0}\n\n'
    "id: 8\n"
    "event: finished\n"
    f'data: {{"seq": 8, "at": "{_FINISHED}", "kind": "finished", "body": {{"state": "succeeded", '
    '"reason": "done", "exit_code": 0, "error": ""}}\n\n'
)


class Event(Answer):
    """Something that happened to a job."""

    seq: int
    """Counts from 1, without gaps."""
    at: datetime
    kind: record.Kind
    body: dict[str, Any]
    """What there is to tell of it, by its kind."""
    text: str | None = None
    """What was written, with `output`."""
    log_offset: int | None = None
    """Where that begins in the job's log."""


class Events(Answer):
    """What has happened to a job, oldest first; at most 500 events at a time."""

    model_config = example({"events": _EVENTS})

    events: list[Event]


class Artifact(Answer):
    """A file that a job left behind."""

    path: str
    size: int


class Artifacts(Answer):
    """What a job left behind."""

    model_config = example({"files": [{"path": "hello.txt", "size": 6}]})

    files: list[Artifact]
