"""Sandboxes that stand without a job, until their time is up or someone ends them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Protocol

from pydantic import Field

from cloche.core.job import Env, Labels, Seconds, Size, Value
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec


class Condition(enum.StrEnum):
    """Where a sandbox is in its life. The last one is final."""

    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


class Ending(enum.StrEnum):
    """Why a sandbox is no more."""

    DELETED = "deleted"
    EXPIRED = "expired"
    IDLE = "idle"
    LOST = "lost"
    """Its machine died."""


class Order(Value):
    """A sandbox to make."""

    image: Annotated[str, Field(min_length=1, max_length=128)] = "base"
    limits: Size = Size()
    min_rung: Rung | None = None
    env: Env = Field(default_factory=dict)
    """Variables of every command that is run in it."""
    labels: Labels = Field(default_factory=dict)
    ttl_s: Seconds = 3600
    """It ends this long after it was made, or after it was last kept alive."""
    idle_s: Seconds | None = None
    """It ends once nobody has used it for this long."""

    def spec(self) -> SandboxSpec:
        return self.limits.spec(self.image)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A sandbox, and what has become of it."""

    id: str
    """Its machine's."""
    tenant: str
    home: str
    """The server or worker on whose host the machine is."""
    rung: Rung
    spec: SandboxSpec
    condition: Condition = Condition.RUNNING
    ending: Ending | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime
    used_at: datetime
    expires_at: datetime
    ended_at: datetime | None = None
    idle_s: float | None = None
    job: str = ""
    """The job whose machine it was, when a job's machine is kept."""


class Standings(Protocol):
    """The sandboxes there are. Every call may raise `StoreUnavailable`."""

    async def add(self, standing: Standing) -> None:
        """Remember a sandbox; one that is there already is left as it is.

        The kept machine of a job counts, but is not refused: the job was accepted.

        Raises:
            QuotaExceeded: the tenant has all it may have; nothing is stored.
            LimitsOverQuota: the machine is larger than the tenant may ask for.
        """
        ...

    async def check_room(self, tenant: str, spec: SandboxSpec) -> None:
        """Tell ahead whether `add` would be refused, before there is a machine. Raises as it."""
        ...

    async def get(self, sandbox_id: str, *, tenant: str | None = None) -> Standing:
        """Return a sandbox; with `tenant`, only one of that tenant's.

        Raises:
            NoSuchSandbox: there is none.
        """
        ...

    async def of_job(self, job_id: str) -> Standing | None:
        """Return the sandbox that a job's machine was kept as, if it was."""
        ...

    async def list(
        self, *, tenant: str | None, ended: bool = False, limit: int = 200
    ) -> Sequence[Standing]:
        """List sandboxes, newest first; those that are no more only when asked for."""
        ...

    async def standing(self, home: str) -> Sequence[Standing]:
        """Return every sandbox of a host that has not ended."""
        ...

    async def count(self, tenant: str) -> int:
        """Count a tenant's sandboxes that have not ended."""
        ...

    async def extend(self, sandbox_id: str, until: datetime) -> None:
        """Let a sandbox stand until then. One that has ended stays so."""
        ...

    async def turn(self, sandbox_id: str, condition: Condition) -> None:
        """Note that a sandbox was paused or resumed. One that has ended stays so."""
        ...

    async def touch(self, used: Mapping[str, datetime]) -> None:
        """Note when sandboxes were last used."""
        ...

    async def end(self, sandbox_id: str, ending: Ending) -> None:
        """Note that a sandbox is no more. The first reason stays."""
        ...
