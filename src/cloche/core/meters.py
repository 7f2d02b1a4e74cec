"""What is counted and timed, told by those who do the work to whoever keeps the numbers."""

from __future__ import annotations

from typing import Final, Literal, Protocol

from cloche.core.job import Job

Start = Literal["warm", "cold", "ahead"]
"""A machine was waiting in the pool; was started while someone waited; was started for the pool."""


class Meters(Protocol):
    """Takes numbers. No call waits, fails, or is worth avoiding."""

    def job_started(self, job: Job) -> None:
        """A worker took the job up; for the first time, if `attempt` is 1."""
        ...

    def job_finished(self, job: Job) -> None:
        """The job is over, and that is durable."""
        ...

    def machine_ready(self, start: Start, seconds: float) -> None:
        """A machine was had, after so long."""
        ...

    def pool_failed(self) -> None:
        """The pool could not start a machine; it tries again."""
        ...

    def store_failed(self) -> None:
        """The database did not answer."""
        ...

    def request_answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """An answer began. `route` is the path's template: of those there are few."""
        ...


class Unmetered:
    """Keeps no numbers."""

    def job_started(self, job: Job) -> None:
        pass

    def job_finished(self, job: Job) -> None:
        pass

    def machine_ready(self, start: Start, seconds: float) -> None:
        pass

    def pool_failed(self) -> None:
        pass

    def store_failed(self) -> None:
        pass

    def request_answered(self, route: str, method: str, status: int, seconds: float) -> None:
        pass


UNMETERED: Final[Meters] = Unmetered()
