"""How the server is."""

from __future__ import annotations

from typing import Literal

from cloche.api.described import Answer, example
from cloche.core.job import State


class Alive(Answer):
    """The process lives."""

    model_config = example({"status": "ok"})

    status: Literal["ok"]


class Pool(Answer):
    """Machines that wait for work."""

    ready: int


class Worker(Answer):
    """Who takes jobs up."""

    alive: bool
    silent_s: float
    """Since it last looked at the queue."""


class Ready(Answer):
    """Jobs can be taken and run."""

    model_config = example(
        {
            "status": "ready",
            "rung": "container",
            "jobs": {"queued": 0, "running": 2, "succeeded": 128, "failed": 3, "cancelled": 1},
            "pool": {"ready": 2},
            "worker": {"alive": True, "silent_s": 0.214},
        }
    )

    status: Literal["ready"]
    rung: str
    jobs: dict[State, int]
    pool: Pool
    worker: Worker
