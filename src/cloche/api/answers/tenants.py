"""Tenants, what each may have, and what it has."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from cloche.api.described import Answer, example
from cloche.core.quota import Quota

NAME: Final = "acme"
OVERRIDES: Final[dict[str, Any]] = {"jobs": 500, "storage_mib": 10_240}
_USED: Final = {"jobs": 3, "sandboxes": 1, "cpu_s": 812.44, "storage_bytes": 48_202_113}
_USAGE: Final[dict[str, Any]] = {
    "tenant": NAME,
    "quota": {**Quota().model_dump(), **OVERRIDES},
    "used": _USED,
    "month": {"since": "2026-03-01T00:00:00+00:00", "until": "2026-04-01T00:00:00+00:00"},
}


class Used(Answer):
    """What a tenant has of what its quota bounds."""

    jobs: int
    sandboxes: int
    cpu_s: float
    """This month, of what has ended."""
    storage_bytes: int


class Month(Answer):
    """The calendar month, in UTC, that processor time is counted by."""

    since: datetime
    until: datetime


class TenantUsage(Answer):
    """What a tenant has, and what it may have."""

    model_config = example(_USAGE)

    tenant: str
    quota: Quota
    used: Used
    month: Month


class TenantQuota(TenantUsage):
    """What a tenant has and may have, and where that differs from the server's default."""

    model_config = example({**_USAGE, "overrides": OVERRIDES})

    overrides: dict[str, float | None]


class Tenant(Answer):
    """A tenant: any name that has a key, a job, a quota or something in store."""

    tenant: str
    keys: int
    """In force."""
    used: Used
    overrides: dict[str, float | None]


class Tenants(Answer):
    """Every tenant, by name."""

    model_config = example(
        {"tenants": [{"tenant": NAME, "keys": 2, "used": _USED, "overrides": OVERRIDES}]}
    )

    tenants: list[Tenant]
