"""Standing sandboxes in SQL: `cloche.core.standing.Standings`, on both databases alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from cloche.core.errors import NoSuchSandbox
from cloche.core.quota import Quota
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.core.standing import Condition, Ending, Standing
from cloche.stores import quotas
from cloche.stores.database import Database, reads, writes
from cloche.stores.tables import sandboxes

_ALIVE = sandboxes.c.condition != Condition.ENDED


class Standings:
    """Sandboxes in their table. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database, quota: Quota | None = None) -> None:
        self._database = database
        self._quota = quota or Quota()
        """What a tenant may have that has no quota of its own."""

    @writes
    def add(self, connection: sa.Connection, standing: Standing) -> None:
        row = {**asdict(standing), "env": dict(standing.env), "labels": dict(standing.labels)}
        known = sa.select(sandboxes.c.id).where(sandboxes.c.id == standing.id)
        quotas.lock(connection, standing.tenant)
        if connection.execute(known).one_or_none() is not None:
            return
        if not standing.job:
            quotas.admit_sandbox(connection, standing.tenant, standing.spec, self._quota)
        connection.execute(sandboxes.insert().values(row))

    @reads
    def check_room(self, connection: sa.Connection, tenant: str, spec: SandboxSpec) -> None:
        quotas.admit_sandbox(connection, tenant, spec, self._quota)

    async def get(self, sandbox_id: str, *, tenant: str | None = None) -> Standing:
        query = sa.select(sandboxes).where(sandboxes.c.id == sandbox_id)
        if tenant is not None:
            query = query.where(sandboxes.c.tenant == tenant)
        found = await self._find(query)
        if not found:
            raise NoSuchSandbox(
                f"There is no sandbox {sandbox_id[:64]!r}.",
                remedy="List your sandboxes for their ids.",
            )
        return found[0]

    async def of_job(self, job_id: str) -> Standing | None:
        found = await self._find(sa.select(sandboxes).where(sandboxes.c.job == job_id))
        return found[0] if found else None

    async def list(
        self, *, tenant: str | None, ended: bool = False, limit: int = 200
    ) -> Sequence[Standing]:
        query = sa.select(sandboxes).order_by(sandboxes.c.created_at.desc(), sandboxes.c.id)
        if tenant is not None:
            query = query.where(sandboxes.c.tenant == tenant)
        if not ended:
            query = query.where(_ALIVE)
        return await self._find(query.limit(limit))

    async def standing(self, home: str) -> Sequence[Standing]:
        return await self._find(sa.select(sandboxes).where(sandboxes.c.home == home, _ALIVE))

    @reads
    def count(self, connection: sa.Connection, tenant: str) -> int:
        return quotas.standing(connection, tenant)

    async def extend(self, sandbox_id: str, until: datetime) -> None:
        await self._change(sandbox_id, {"expires_at": until})

    async def turn(self, sandbox_id: str, condition: Condition) -> None:
        await self._change(sandbox_id, {"condition": condition})

    @writes
    def touch(self, connection: sa.Connection, used: Mapping[str, datetime]) -> None:
        for sandbox_id, used_at in used.items():
            mine = sandboxes.c.id == sandbox_id
            connection.execute(sandboxes.update().where(mine).values(used_at=used_at))

    async def end(self, sandbox_id: str, ending: Ending) -> None:
        ended = {"condition": Condition.ENDED, "ending": ending, "ended_at": datetime.now(UTC)}
        await self._change(sandbox_id, ended)

    @writes
    def _change(
        self, connection: sa.Connection, sandbox_id: str, values: Mapping[str, Any]
    ) -> None:
        mine = (sandboxes.c.id == sandbox_id) & _ALIVE
        connection.execute(sandboxes.update().where(mine).values(dict(values)))

    @reads
    def _find(self, connection: sa.Connection, query: sa.Select[Any]) -> Sequence[Standing]:
        return [_standing(row) for row in connection.execute(query).mappings()]


def _standing(row: sa.RowMapping) -> Standing:
    parts = {
        "spec": SandboxSpec(**row["spec"]),
        "rung": Rung(row["rung"]),
        "condition": Condition(row["condition"]),
        "ending": Ending(row["ending"]) if row["ending"] else None,
    }
    return Standing(**{**row, **parts})
