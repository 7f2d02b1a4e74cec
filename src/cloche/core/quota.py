"""How much a tenant may have: of jobs, machines, processor time, storage and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from cloche.core.errors import LimitsOverQuota, QuotaExceeded

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]

_MIB = 1 << 20


class Quota(BaseModel):
    """What one tenant may have. None is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs: Count | None = 10_000
    """Queued and running, together."""
    sandboxes: Count | None = 50
    """Standing at once."""
    cpu_s: Amount | None = None
    """Processor seconds in a calendar month (UTC), of what has ended."""
    storage_mib: Count | None = None
    """Artifacts and uploads, as long as they are held."""
    requests_per_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = 1000
    """Of one key, to one server process."""
    burst: Size = 2000
    """Requests that a rested key may make at once."""
    max_vcpus: Size | None = None
    max_memory_mib: Size | None = None
    max_disk_mib: Size | None = None
    max_wall_s: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = None

    def overlaid(self, overrides: Mapping[str, Any]) -> Quota:
        """Return this quota with a tenant's own values in place."""
        return Quota.model_validate({**self.model_dump(), **overrides})

    def check_machine(
        self, *, vcpus: int, memory_mib: int, disk_mib: int, wall_s: float | None = None
    ) -> None:
        """Check the size of a machine, and how long it may run, against what may be asked for.

        Raises:
            LimitsOverQuota: what is too large, and what would do.
        """
        asked = {"vcpus": vcpus, "memory_mib": memory_mib, "disk_mib": disk_mib, "wall_s": wall_s}
        for name, value in asked.items():
            most = getattr(self, f"max_{name}")
            if value is not None and most is not None and value > most:
                raise LimitsOverQuota(
                    f"{name} is {value:g}; this tenant may ask for at most {most:g}.",
                    remedy=f"Ask for {name} <= {most:g} (one that is left out has its default), "
                    "or have an admin raise the tenant's quota.",
                )

    def check_jobs(self, others: int) -> None:
        """Check that a job may join `others` that are queued or running.

        Raises:
            QuotaExceeded: there is no room.
        """
        if self.jobs is not None and others >= self.jobs:
            raise QuotaExceeded(
                f"This tenant has {others} jobs queued or running; its quota is {self.jobs}.",
                remedy="Wait for one to end, or cancel one.",
                quota="jobs",
                used=others,
                limit=self.jobs,
            )

    def check_sandboxes(self, others: int) -> None:
        """Check that a sandbox may join `others` that stand.

        Raises:
            QuotaExceeded: there is no room.
        """
        if self.sandboxes is not None and others >= self.sandboxes:
            raise QuotaExceeded(
                f"This tenant has {others} sandboxes; its quota is {self.sandboxes}.",
                remedy="Destroy one that is no longer needed.",
                quota="sandboxes",
                used=others,
                limit=self.sandboxes,
            )

    def check_cpu(self, used_s: float, now: datetime) -> None:
        """Check that there is processor time left this month.

        Raises:
            QuotaExceeded: it is used up; it says when the next month begins.
        """
        if self.cpu_s is not None and used_s >= self.cpu_s:
            month = Month.of(now)
            raise QuotaExceeded(
                f"This tenant has used {used_s:.1f} CPU seconds this month; "
                f"its quota is {self.cpu_s:g}.",
                remedy=f"Wait for {month.until.date()} (UTC), or have an admin raise the quota.",
                quota="cpu_s",
                used=round(used_s, 3),
                limit=self.cpu_s,
                retry_after_s=(month.until - now).total_seconds(),
            )

    def check_storage(self, held_bytes: int, more_bytes: int = 0) -> None:
        """Check that `more_bytes` may be held besides `held_bytes`; with none, that room is left.

        Raises:
            QuotaExceeded: there is no room.
        """
        if self.storage_mib is None:
            return
        limit = self.storage_mib * _MIB
        if held_bytes + max(more_bytes, 1) > limit:
            raise QuotaExceeded(
                f"This tenant holds {held_bytes} bytes of artifacts and uploads"
                + (f", and this is {more_bytes} more" if more_bytes else "")
                + f"; its quota is {self.storage_mib} MiB.",
                remedy="Delete jobs that are over, or uploads that are no longer needed.",
                quota="storage_mib",
                used=round(held_bytes / _MIB, 3),
                limit=self.storage_mib,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """A calendar month in UTC: what processor time is counted by."""

    since: datetime
    until: datetime

    @classmethod
    def of(cls, moment: datetime) -> Month:
        first = moment.astimezone(UTC).date().replace(day=1)
        following = (first + timedelta(days=31)).replace(day=1)
        return cls(since=_midnight(first), until=_midnight(following))


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a tenant has of what its quota bounds."""

    jobs: int = 0
    sandboxes: int = 0
    cpu_s: float = 0.0
    """This month, of jobs that have ended."""
    storage_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant: any name that has a key, a job, a quota or something in store."""

    name: str
    keys: int
    """In force."""
    usage: Usage
    overrides: Mapping[str, Any]
    """Where its quota differs from the server's default."""


class Quotas(Protocol):
    """Quotas, and what is counted against them. Every call may raise `StoreUnavailable`."""

    async def of(self, tenant: str) -> Quota:
        """Return what a tenant may have: the server's default, and its own values over that."""
        ...

    async def overrides(self, tenant: str) -> Mapping[str, Any]:
        """Return where a tenant's quota differs from the default."""
        ...

    async def override(self, tenant: str, values: Mapping[str, Any]) -> None:
        """Let a tenant's quota differ in these values, and in no others."""
        ...

    async def usage(self, tenant: str) -> Usage: ...

    async def tenants(self) -> Sequence[Tenant]:
        """Return every tenant, by name."""
        ...

    async def charge(self, tenant: str, cpu_s: float) -> None:
        """Count processor time that a tenant has used."""
        ...
