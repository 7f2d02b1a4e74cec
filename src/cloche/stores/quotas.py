"""Quotas in SQL: `cloche.core.quota.Quotas`, on SQLite and PostgreSQL alike.

The functions take part in a transaction of their caller: whoever adds something
that is counted locks the tenant, adds it, and counts. Of two that take the last
place at once, one waits for the other and is then refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from cloche.core.job import Limits, State
from cloche.core.quota import Month, Quota, Tenant, Usage
from cloche.core.spec import SandboxSpec
from cloche.core.standing import Condition
from cloche.stores.database import Database, reads, writes
from cloche.stores.tables import (
    jobs,
    kept_artifacts,
    keys,
    processor_time,
    quotas,
    sandboxes,
    uploads,
)

_LOCK = 0x636C6F63
"""Ours among the advisory locks of a PostgreSQL server."""
_MOST_CPU_S = 1e9
_HELD = (kept_artifacts, uploads)
_TABLES = (keys, jobs, sandboxes, quotas, processor_time, *_HELD)
_STANDING = sandboxes.c.condition != Condition.ENDED
_ACTIVE = jobs.c.state.in_([State.QUEUED, State.RUNNING])


class Quotas:
    """Quotas and counts in tables. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database, default: Quota) -> None:
        self._database = database
        self._default = default

    @reads
    def of(self, connection: sa.Connection, tenant: str) -> Quota:
        return quota_of(connection, tenant, self._default)

    @reads
    def overrides(self, connection: sa.Connection, tenant: str) -> Mapping[str, Any]:
        return _overrides(connection, tenant)

    @writes
    def override(self, connection: sa.Connection, tenant: str, values: Mapping[str, Any]) -> None:
        lock(connection, tenant)
        connection.execute(quotas.delete().where(quotas.c.tenant == tenant))
        if values:
            row = {"tenant": tenant, "overrides": dict(values)}
            connection.execute(quotas.insert().values(row))

    @reads
    def usage(self, connection: sa.Connection, tenant: str) -> Usage:
        return Usage(
            jobs=_active(connection, tenant),
            sandboxes=standing(connection, tenant),
            cpu_s=_cpu_s(connection, tenant, datetime.now(UTC)),
            storage_bytes=_held(connection, tenant),
        )

    @reads
    def tenants(self, connection: sa.Connection) -> Sequence[Tenant]:
        in_force = keys.c.revoked_at.is_(None)
        this_month = processor_time.c.day >= Month.of(datetime.now(UTC)).since.date()
        cpu_ms = sa.func.sum(processor_time.c.cpu_ms)
        having_keys = _by_tenant(connection, keys, sa.func.count(), in_force)
        having_sandboxes = _by_tenant(connection, sandboxes, sa.func.count(), _STANDING)
        having_jobs = _by_tenant(connection, jobs, sa.func.count(), _ACTIVE)
        spending = _by_tenant(connection, processor_time, cpu_ms, this_month)
        holding: Counter[str] = Counter()
        for table in _HELD:
            total = sa.func.sum(table.c.size)
            holding.update(_by_tenant(connection, table, total, sa.true()))
        rows = connection.execute(sa.select(quotas)).all()
        names = sa.union(*(sa.select(table.c.tenant) for table in _TABLES))
        everyone = set(connection.execute(names).scalars())
        overrides = {row.tenant: row.overrides for row in rows}
        return [
            Tenant(
                name=name,
                keys=having_keys.get(name, 0),
                usage=Usage(
                    jobs=having_jobs.get(name, 0),
                    sandboxes=having_sandboxes.get(name, 0),
                    cpu_s=spending.get(name, 0) / 1000,
                    storage_bytes=holding[name],
                ),
                overrides=overrides.get(name, {}),
            )
            for name in sorted(everyone)
        ]

    @writes
    def charge(self, connection: sa.Connection, tenant: str, cpu_s: float) -> None:
        charge(connection, tenant, cpu_s)


def lock(connection: sa.Connection, tenant: str) -> None:
    """Let nobody else count or add what is this tenant's until our transaction ends."""
    # SQLite has one writer at a time as it is.
    if connection.dialect.name == "postgresql":
        ours = sa.func.pg_advisory_xact_lock(_LOCK, sa.func.hashtext(tenant))
        connection.execute(sa.select(ours))


def quota_of(connection: sa.Connection, tenant: str, default: Quota) -> Quota:
    return default.overlaid(_overrides(connection, tenant))


def admit(connection: sa.Connection, tenant: str, limits: Limits, default: Quota) -> None:
    """Check a job that was just added, by a transaction that has locked the tenant.

    Raises:
        QuotaExceeded: the tenant has all it may have.
        LimitsOverQuota: the job's machine is larger than the tenant may ask for.
    """
    quota = quota_of(connection, tenant, default)
    quota.check_machine(
        vcpus=limits.vcpus,
        memory_mib=limits.memory_mib,
        disk_mib=limits.disk_mib,
        wall_s=limits.wall_s,
    )
    if quota.jobs is not None:
        quota.check_jobs(_active(connection, tenant) - 1)
    _check_cpu(connection, tenant, quota)
    if quota.storage_mib is not None:
        quota.check_storage(_held(connection, tenant))


def admit_sandbox(
    connection: sa.Connection, tenant: str, spec: SandboxSpec, default: Quota
) -> None:
    """Check a sandbox that is to be added, by a transaction that has locked the tenant.

    Raises:
        QuotaExceeded: the tenant has all it may have.
        LimitsOverQuota: the machine is larger than the tenant may ask for.
    """
    quota = quota_of(connection, tenant, default)
    quota.check_machine(vcpus=spec.vcpus, memory_mib=spec.memory_mib, disk_mib=spec.disk_mib)
    if quota.sandboxes is not None:
        quota.check_sandboxes(standing(connection, tenant))
    _check_cpu(connection, tenant, quota)


def _check_cpu(connection: sa.Connection, tenant: str, quota: Quota) -> None:
    if quota.cpu_s is not None:
        now = datetime.now(UTC)
        quota.check_cpu(_cpu_s(connection, tenant, now), now)


def standing(connection: sa.Connection, tenant: str) -> int:
    """Count a tenant's sandboxes that have not ended."""
    query = sa.select(sa.func.count()).select_from(sandboxes)
    mine = query.where(sandboxes.c.tenant == tenant, _STANDING)
    return connection.execute(mine).scalar_one()


def charge(connection: sa.Connection, tenant: str, cpu_s: float) -> None:
    """Add processor time to today's."""
    # Part of it may be a guest's word.
    cpu_ms = round(min(max(cpu_s, 0.0), _MOST_CPU_S) * 1000) if math.isfinite(cpu_s) else 0
    if not cpu_ms:
        return
    lock(connection, tenant)
    today = datetime.now(UTC).date()
    row = {"tenant": tenant, "day": today}
    mine = (processor_time.c.tenant == tenant) & (processor_time.c.day == today)
    more = processor_time.update().where(mine).values(cpu_ms=processor_time.c.cpu_ms + cpu_ms)
    if not connection.execute(more).rowcount:
        connection.execute(processor_time.insert().values(**row, cpu_ms=cpu_ms))


def keep(connection: sa.Connection, tenant: str, job_id: str, size: int) -> None:
    """Count a job's artifacts, whatever the quota: they are there when they are counted."""
    row = {"job_id": job_id, "tenant": tenant, "size": size}
    connection.execute(kept_artifacts.insert().values(row))


def admit_upload(connection: sa.Connection, tenant: str, size: int, default: Quota) -> None:
    """Check an upload that is to be added, by a transaction that has locked the tenant.

    Raises:
        QuotaExceeded: there is no room for it.
    """
    quota = quota_of(connection, tenant, default)
    if quota.storage_mib is not None:
        quota.check_storage(_held(connection, tenant), size)


def _overrides(connection: sa.Connection, tenant: str) -> Mapping[str, Any]:
    query = sa.select(quotas.c.overrides).where(quotas.c.tenant == tenant)
    found: Mapping[str, Any] | None = connection.execute(query).scalar_one_or_none()
    return found or {}


def _active(connection: sa.Connection, tenant: str) -> int:
    query = sa.select(sa.func.count()).select_from(jobs).where(jobs.c.tenant == tenant, _ACTIVE)
    return connection.execute(query).scalar_one()


def _cpu_s(connection: sa.Connection, tenant: str, now: datetime) -> float:
    query = sa.select(sa.func.coalesce(sa.func.sum(processor_time.c.cpu_ms), 0)).where(
        processor_time.c.tenant == tenant, processor_time.c.day >= Month.of(now).since.date()
    )
    return int(connection.execute(query).scalar_one()) / 1000


def _held(connection: sa.Connection, tenant: str) -> int:
    return sum([_size_of(connection, table, tenant) for table in _HELD])


def _size_of(connection: sa.Connection, table: sa.Table, tenant: str) -> int:
    total = sa.func.coalesce(sa.func.sum(table.c.size), 0)
    query = sa.select(total).where(table.c.tenant == tenant)
    return int(connection.execute(query).scalar_one())


def _by_tenant(
    connection: sa.Connection,
    table: sa.Table,
    total: sa.ColumnElement[Any],
    where: sa.ColumnElement[bool],
) -> dict[str, int]:
    query = sa.select(table.c.tenant, total).where(where).group_by(table.c.tenant)
    return {tenant: int(count) for tenant, count in connection.execute(query)}
