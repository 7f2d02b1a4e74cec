"""Sandboxes, and what runs in them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from cloche.api.described import Answer, example
from cloche.core.rung import Rung
from cloche.core.standing import Condition, Ending

ID: Final = "3fa9c1d20b77"
PROCESS_ID: Final = "a81c55d0f2e94b36"


class SandboxLimits(Answer):
    """How large a sandbox's machine is."""

    vcpus: int
    memory_mib: int
    disk_mib: int
    pids: int


class SandboxUsage(Answer):
    """What a sandbox has used so far, as its host counts it."""

    memory_bytes: int
    memory_peak_bytes: int
    cpu_s: float
    processes: int
    oom_kills: int
    """Processes the kernel ended because the machine's memory was full."""


_SANDBOX: Final[dict[str, Any]] = {
    "id": ID,
    "tenant": "default",
    "state": "running",
    "reason": None,
    "rung": "container",
    "host": "alpha",
    "image": "base",
    "limits": {"vcpus": 2, "memory_mib": 2048, "disk_mib": 8192, "pids": 1024},
    "env": ["COLOUR"],
    "labels": {"team": "blue"},
    "job": None,
    "idle_s": 600,
    "created_at": "2026-03-02T09:15:04.120518+00:00",
    "used_at": "2026-03-02T09:16:40.002311+00:00",
    "expires_at": "2026-03-02T10:15:04.120518+00:00",
    "ended_at": None,
}
_USAGE: Final = {
    "memory_bytes": 21_561_344,
    "memory_peak_bytes": 64_389_120,
    "cpu_s": 0.412,
    "processes": 3,
    "oom_kills": 0,
}


class Sandbox(Answer):
    """A sandbox, and what has become of it."""

    model_config = example({**_SANDBOX, "usage": _USAGE})

    id: str
    tenant: str
    state: Condition
    reason: Ending | None
    """Why it is no more."""
    rung: Rung
    host: str
    """The server or worker on whose host it is."""
    image: str
    limits: SandboxLimits
    env: list[str]
    """The names alone: their values may be secrets."""
    labels: dict[str, str]
    job: str | None
    """The job whose machine it was, when a job's machine is kept."""
    idle_s: float | None
    created_at: datetime
    used_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    usage: SandboxUsage | None = None
    """Told of one sandbox at a time, as long as it stands on the host that is asked."""


class Sandboxes(Answer):
    """Sandboxes, newest first."""

    model_config = example({"sandboxes": [_SANDBOX]})

    sandboxes: list[Sandbox]


_EXIT: Final[dict[str, Any]] = {
    "exit_code": 0,
    "signal": None,
    "timed_out": False,
    "duration_s": 0.031,
    "cpu_s": 0.018,
    "max_rss_kib": 9728,
}


class ExecResult(Answer):
    """What a command did, now that it has ended. An exit code is a result, not an error."""

    model_config = example(
        {"process": PROCESS_ID, **_EXIT, "stdout": "hello\n", "stderr": "", "truncated": False}
    )

    process: str
    """Its id, by which all that it wrote can be read."""
    exit_code: int
    """128 + the signal's number for one that a signal ended."""
    signal: int | None
    timed_out: bool
    duration_s: float
    cpu_s: float
    max_rss_kib: int
    stdout: str
    stderr: str
    truncated: bool
    """It wrote more than this answer holds."""


_PROCESS: Final[dict[str, Any]] = {
    "id": PROCESS_ID,
    "pid": 17,
    "argv": ["bash", "-c", "echo hello"],
    "pty": False,
    "started_at": 1772442904.51,
    "stdout_bytes": 6,
    "stderr_bytes": 0,
}


class Process(Answer):
    """A process in a sandbox. How it ended is told once it has."""

    model_config = example({**_PROCESS, "running": False, **_EXIT})

    id: str
    pid: int
    argv: list[str]
    pty: bool
    started_at: float
    """Seconds since the epoch, by the machine's clock."""
    stdout_bytes: int
    stderr_bytes: int
    running: bool
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool | None = None
    duration_s: float | None = None
    cpu_s: float | None = None
    max_rss_kib: int | None = None


class Processes(Answer):
    """What was started in a sandbox: what runs, and what ended of late."""

    model_config = example({"processes": [{**_PROCESS, "running": True}]})

    processes: list[Process]


OUTPUT_STREAM: Final = (
    f'event: started\ndata: {{"process": "{PROCESS_ID}", "pid": 17}}\n\n'
    "id: 6:0\n"
    'event: output\ndata: {"stream": "stdout", "offset": 0, "text": "hello\\n"}\n\n'
    'event: exit\ndata: {"exit_code": 0, "signal": null, "timed_out": false, '
    '"duration_s": 0.031, "cpu_s": 0.018, "max_rss_kib": 9728}\n\n'
)
