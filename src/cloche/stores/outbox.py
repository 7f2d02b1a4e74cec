"""Deliveries in SQL: `cloche.core.outbox.Outbox`, on SQLite and PostgreSQL alike."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa

from cloche.core.job import Job
from cloche.core.outbox import Attempt, Delivery, Fate, announce
from cloche.core.webhook import Event
from cloche.stores.database import Database, reads, writes
from cloche.stores.tables import deliveries, secrets

_NAME: Final = "webhooks"
"""Of the secret that they are signed with."""


class Outbox:
    """Rows of the `deliveries` table. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(
        self, owner: str, *, lease: timedelta, limit: int, per_receiver: int, per_tenant: int
    ) -> Sequence[Delivery]:
        now = datetime.now(UTC)
        # Chosen in a transaction that only looks: it is asked every moment and mostly in vain,
        # and where much is waiting it takes a while; nobody else has to wait for it.
        wanted = await self._choose(_next_in_turn(now, limit, per_receiver, per_tenant))
        return await self._hold(wanted, owner, now, lease) if wanted else []

    @reads
    def _choose(self, connection: sa.Connection, in_turn: sa.Select[Any]) -> Sequence[str]:
        return connection.execute(in_turn).scalars().all()

    @writes
    def _hold(
        self,
        connection: sa.Connection,
        wanted: Sequence[str],
        owner: str,
        now: datetime,
        lease: timedelta,
    ) -> Sequence[Delivery]:
        # The lock is PostgreSQL's; SQLite has one writer at a time as it is.
        still = (
            sa.select(deliveries.c.id)
            .where(deliveries.c.id.in_(wanted), _is_due(now))
            .with_for_update(skip_locked=True)
        )
        mine = deliveries.c.id.in_(connection.execute(still).scalars().all())
        connection.execute(
            deliveries.update().where(mine).values(owner=owner, lease_until=now + lease)
        )
        held = sa.select(deliveries).where(mine).order_by(deliveries.c.next_at, deliveries.c.id)
        return [_delivery(row) for row in connection.execute(held)]

    @writes
    def settle(
        self, connection: sa.Connection, owner: str, delivery_id: str, attempt: Attempt
    ) -> None:
        held = (deliveries.c.id == delivery_id) & _held_by(owner)
        values = {
            "state": attempt.state,
            "attempts": deliveries.c.attempts + 1,
            "last_at": attempt.at,
            "next_at": attempt.next_at,
            "last_error": attempt.error,
            **_LET_GO,
        }
        connection.execute(deliveries.update().where(held).values(values))

    @writes
    def reclaim(self, connection: sa.Connection, owner: str) -> None:
        connection.execute(deliveries.update().where(_held_by(owner)).values(_LET_GO))

    @reads
    def of_job(self, connection: sa.Connection, job_id: str) -> Sequence[Delivery]:
        query = (
            sa.select(deliveries)
            .where(deliveries.c.job_id == job_id)
            .order_by(deliveries.c.created_at, deliveries.c.id)
        )
        return [_delivery(row) for row in connection.execute(query)]

    async def secret(self, proposed: str) -> str:
        if (found := await self._secret()) is not None:
            return found
        try:
            await self._keep_secret(proposed)
        except sa.exc.IntegrityError:  # Another server was first.
            return await self.secret(proposed)
        return proposed

    @reads
    def _secret(self, connection: sa.Connection) -> str | None:
        query = sa.select(secrets.c.value).where(secrets.c.name == _NAME)
        return connection.execute(query).scalar_one_or_none()

    @writes
    def _keep_secret(self, connection: sa.Connection, value: str) -> None:
        connection.execute(secrets.insert().values(name=_NAME, value=value))


_LET_GO: dict[str, Any] = {"owner": "", "lease_until": None}


def add_delivery(connection: sa.Connection, job: Job, event: Event) -> None:
    """Note, within the transaction that changes a job, that its receiver is to be told."""
    delivery = announce(job, event, datetime.now(UTC))
    if delivery is None:
        return
    connection.execute(
        deliveries.insert().values(
            id=delivery.id,
            job_id=delivery.job_id,
            tenant=delivery.tenant,
            url=delivery.url,
            receiver=delivery.receiver,
            event=delivery.event,
            body=delivery.body,
            created_at=delivery.created_at,
            state=delivery.state,
            next_at=delivery.next_at,
        )
    )


def _held_by(owner: str) -> sa.ColumnElement[bool]:
    return (deliveries.c.owner == owner) & (deliveries.c.state == Fate.PENDING)


def _is_due(now: datetime) -> sa.ColumnElement[bool]:
    lease_until = deliveries.c.lease_until
    return (
        (deliveries.c.state == Fate.PENDING)
        & (deliveries.c.next_at <= now)
        & (lease_until.is_(None) | (lease_until <= now))
    )


def _next_in_turn(
    now: datetime, limit: int, per_receiver: int, per_tenant: int
) -> sa.Select[tuple[str]]:
    """Choose what is sent next: of each receiver its share, of each tenant in turn, by age."""
    columns = (
        deliveries.c.id,
        deliveries.c.tenant,
        deliveries.c.receiver,
        deliveries.c.next_at,
        sa.literal(0).label("turn"),
    )
    due = sa.select(*columns).where(_is_due(now)).subquery()
    spared = _shared_out(due, due.c.receiver, now, per_receiver)
    # Only then by tenant, a receiver of each in turn: what waits for one that does not answer
    # neither counts against the tenant's others nor comes before them.
    turns = _shared_out(spared, spared.c.tenant, now, per_tenant)
    return sa.select(turns.c.id).order_by(turns.c.turn, turns.c.next_at, turns.c.id).limit(limit)


def _shared_out(
    waiting: sa.Subquery, by: sa.ColumnElement[str], now: datetime, share: int
) -> sa.Subquery:
    """Keep of what waits as much as fits into each one's share, beside what is under way."""
    whose = deliveries.c[by.key or ""]
    busy = (
        sa.select(whose.label("whose"), sa.func.count().label("count"))
        .where(deliveries.c.state == Fate.PENDING, deliveries.c.lease_until > now)
        .group_by(whose)
        .subquery()
    )
    in_line = sa.func.row_number().over(
        partition_by=by, order_by=(waiting.c.turn, waiting.c.next_at, waiting.c.id)
    ) + sa.func.coalesce(busy.c.count, 0)
    ranked = (
        sa.select(
            waiting.c.id,
            waiting.c.tenant,
            waiting.c.receiver,
            waiting.c.next_at,
            in_line.label("turn"),
        )
        .select_from(waiting.outerjoin(busy, by == busy.c.whose))
        .subquery()
    )
    return sa.select(ranked).where(ranked.c.turn <= share).subquery()


def _delivery(row: sa.Row[Any]) -> Delivery:
    return Delivery(
        id=row.id,
        job_id=row.job_id,
        tenant=row.tenant,
        url=row.url,
        event=row.event,
        body=row.body,
        created_at=row.created_at,
        state=Fate(row.state),
        attempts=row.attempts,
        last_at=row.last_at,
        next_at=row.next_at,
        last_error=row.last_error,
    )
