"""The durable queue in SQL: `cloche.core.queue.Queue`, on SQLite and PostgreSQL alike."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from cloche.core.errors import BadRequest, IdempotencyConflict, JobNotOver, LeaseLost, NoSuchJob
from cloche.core.job import Job, Outcome, Reason, Request, State
from cloche.core.meters import UNMETERED, Meters
from cloche.core.queue import Filter, Page, Submitted
from cloche.core.quota import Quota
from cloche.core.record import Entry
from cloche.core.rung import Rung
from cloche.stores import quotas
from cloche.stores.database import Database
from cloche.stores.outbox import add_delivery
from cloche.stores.record import add_entries
from cloche.stores.tables import Moment, jobs


class Queue:
    """Jobs in the `jobs` table. What each call does and raises is told at the protocol."""

    def __init__(
        self, database: Database, quota: Quota | None = None, meters: Meters = UNMETERED
    ) -> None:
        self._database = database
        self._meters = meters
        self._quota = quota or Quota()
        """What a tenant may have that has no quota of its own."""

    async def submit(self, tenant: str, request: Request, *, traceparent: str = "") -> Submitted:
        job_id = secrets.token_hex(8)
        row = {
            "id": job_id,
            "tenant": tenant,
            "request": request.model_dump(mode="json", exclude_defaults=True),
            "labels": dict(request.labels),
            "idempotency_key": request.idempotency_key,
            "state": State.QUEUED,
            "priority": request.priority,
            "created_at": datetime.now(UTC),
        }
        try:
            async with self._database.write() as connection:
                await quotas.lock(connection, tenant)
                await connection.execute(jobs.insert().values(row))
                # After the insert: a job that was submitted before needs no room.
                await quotas.admit(connection, tenant, request.limits, self._quota)
                body = {"traceparent": traceparent} if traceparent else {}
                await add_entries(connection, job_id, [Entry(kind="submitted", body=body)])
                return Submitted(job=await _get(connection, job_id), created=True)
        except sa.exc.IntegrityError:
            return await self._earlier(tenant, request)

    async def _earlier(self, tenant: str, request: Request) -> Submitted:
        """Return the job that the same key made before."""
        same = (jobs.c.tenant == tenant) & (jobs.c.idempotency_key == request.idempotency_key)
        async with self._database.read() as connection:
            found = (await connection.execute(sa.select(jobs).where(same))).one()
        job = _job(found)
        if job.request != request:
            raise IdempotencyConflict(
                f"The idempotency key {request.idempotency_key!r} was used for another request.",
                remedy="Use a new key for a new request.",
            )
        return Submitted(job=job, created=False)

    async def get(self, job_id: str, *, tenant: str | None = None) -> Job:
        async with self._database.read() as connection:
            return await _get(connection, job_id, tenant)

    async def list(
        self, *, tenant: str | None, where: Filter, cursor: str | None = None, limit: int = 50
    ) -> Page:
        query = sa.select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc())
        if tenant is not None:
            query = query.where(jobs.c.tenant == tenant)
        if where.states:
            query = query.where(jobs.c.state.in_(sorted(where.states)))
        for name, value in (where.labels or {}).items():
            query = query.where(jobs.c.labels[name].as_string() == value)
        if cursor is not None:
            created_at, job_id = _parse_cursor(cursor)
            older = jobs.c.created_at < created_at
            query = query.where(older | ((jobs.c.created_at == created_at) & (jobs.c.id < job_id)))
        async with self._database.read() as connection:
            rows = (await connection.execute(query.limit(limit + 1))).all()
        found = tuple(_job(row) for row in rows[:limit])
        return Page(jobs=found, next_cursor=_cursor(found[-1]) if len(rows) > limit else None)

    async def acquire(
        self, worker: str, *, lease: timedelta, limit: int, per_tenant: int
    ) -> Sequence[Job]:
        now = datetime.now(UTC)
        async with self._database.write() as connection:
            # The lock is PostgreSQL's; SQLite has one writer at a time as it is.
            ids = (
                sa.select(jobs.c.id)
                .where(jobs.c.id.in_(_next_in_turn(limit, per_tenant)))
                .where(jobs.c.state == State.QUEUED)
                .with_for_update(skip_locked=True)
            )
            chosen = (await connection.execute(ids)).scalars().all()
            if not chosen:
                return []
            await connection.execute(
                jobs.update()
                .where(jobs.c.id.in_(chosen))
                .values(
                    state=State.RUNNING,
                    worker=worker,
                    lease_until=now + lease,
                    attempt=jobs.c.attempt + 1,
                    started_at=sa.func.coalesce(jobs.c.started_at, sa.bindparam(None, now, Moment)),
                )
            )
            taken = sa.select(jobs).where(jobs.c.id.in_(chosen))
            in_turn = taken.order_by(jobs.c.priority.desc(), jobs.c.created_at, jobs.c.id)
            found = [_job(row) for row in await connection.execute(in_turn)]
            for job in found:
                body = {"worker": worker, "attempt": job.attempt}
                await add_entries(connection, job.id, [Entry(kind="started", body=body)])
                if job.attempt == 1:  # A restart of ours is no news.
                    await add_delivery(connection, job, "started")
        for job in found:
            self._meters.job_started(job)
        return found

    async def renew(self, worker: str, job_ids: Sequence[str], *, lease: timedelta) -> set[str]:
        held = jobs.c.id.in_(job_ids) & _held_by(worker)
        async with self._database.write() as connection:
            until = datetime.now(UTC) + lease
            await connection.execute(jobs.update().where(held).values(lease_until=until))
            return set((await connection.execute(sa.select(jobs.c.id).where(held))).scalars())

    async def place(self, worker: str, job_id: str, *, machine: str, rung: Rung) -> None:
        async with self._database.write() as connection:
            await _change(connection, worker, job_id, {"machine": machine, "rung": rung})

    async def finish(
        self,
        worker: str,
        job_id: str,
        outcome: Outcome,
        *,
        cpu_s: float = 0.0,
        kept_bytes: int = 0,
    ) -> Job:
        values = {
            "state": outcome.state,
            "reason": outcome.reason,
            "exit_code": outcome.exit_code,
            "error": outcome.error,
            "finished_at": datetime.now(UTC),
            "lease_until": None,
            "worker": "",
        }
        async with self._database.write() as connection:
            await _change(connection, worker, job_id, values)
            await _tell_the_end(connection, job_id, outcome)
            job = await _get(connection, job_id)
            await quotas.charge(connection, job.tenant, cpu_s)
            if kept_bytes:
                await quotas.keep(connection, job.tenant, job_id, kept_bytes)
        self._meters.job_finished(job)
        return job

    async def release(self, worker: str, job_id: str) -> None:
        held = (jobs.c.id == job_id) & _held_by(worker)
        async with self._database.write() as connection:
            await connection.execute(jobs.update().where(held).values(_BACK_IN_THE_QUEUE))

    async def cancel(self, job_id: str, *, tenant: str | None = None) -> Job:
        async with self._database.write() as connection:
            await _get(connection, job_id, tenant)
            mine = jobs.c.id == job_id
            await connection.execute(
                jobs.update()
                .where(mine & (jobs.c.state == State.RUNNING))
                .values(cancel_requested=True)
            )
            # One that ran before, and may have a machine yet, is ended by a worker.
            fresh = mine & (jobs.c.state == State.QUEUED) & (jobs.c.machine == "")
            ended = await connection.execute(
                jobs.update()
                .where(fresh)
                .values(
                    state=State.CANCELLED,
                    reason=Reason.CANCELLED,
                    cancel_requested=True,
                    finished_at=datetime.now(UTC),
                )
            )
            if ended.rowcount:
                await _tell_the_end(connection, job_id, _CANCELLED)
            waiting = mine & (jobs.c.state == State.QUEUED)
            await connection.execute(jobs.update().where(waiting).values(cancel_requested=True))
            job = await _get(connection, job_id)
        if ended.rowcount:
            self._meters.job_finished(job)
        return job

    async def cancelled(self, worker: str) -> set[str]:
        query = sa.select(jobs.c.id).where(_held_by(worker), jobs.c.cancel_requested)
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars())

    async def reclaim(self, worker: str) -> int:
        async with self._database.write() as connection:
            held = (
                await connection.execute(sa.select(jobs.c.id).where(_held_by(worker)))
            ).scalars()
            return len(await _put_back(connection, held.all(), "the server was restarted"))

    async def machines(self) -> set[str]:
        waiting = jobs.c.state.in_([State.QUEUED, State.RUNNING])
        query = sa.select(jobs.c.machine).where(waiting, jobs.c.machine != "")
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars())

    async def over_before(self, moment: datetime, *, limit: int) -> Sequence[str]:
        query = (
            sa.select(jobs.c.id)
            .where(jobs.c.finished_at < moment, jobs.c.state.in_(_FINAL))
            .order_by(jobs.c.finished_at)
            .limit(limit)
        )
        async with self._database.read() as connection:
            return (await connection.execute(query)).scalars().all()

    async def known(self, job_ids: Sequence[str]) -> set[str]:
        query = sa.select(jobs.c.id).where(jobs.c.id.in_(job_ids))
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars())

    async def reap(self) -> Sequence[Job]:
        expired = (jobs.c.state == State.RUNNING) & (jobs.c.lease_until < datetime.now(UTC))
        async with self._database.write() as connection:
            ids = sa.select(jobs.c.id).where(expired).with_for_update(skip_locked=True)
            chosen = (await connection.execute(ids)).scalars().all()
            return await _put_back(connection, chosen, "its worker fell silent")

    async def delete(self, job_id: str, *, tenant: str | None = None) -> None:
        async with self._database.write() as connection:
            job = await _get(connection, job_id, tenant)
            if not job.state.final:
                raise JobNotOver(
                    f"Job {job_id} is {job.state}.", remedy="Cancel it first, or wait for its end."
                )
            gone = await connection.execute(jobs.delete().where(jobs.c.id == job_id))
            if gone.rowcount == 0:
                await _get(connection, job_id, tenant)  # Someone was faster: there is none.

    async def counts(self) -> Mapping[State, int]:
        query = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        async with self._database.read() as connection:
            found = {State(state): count for state, count in await connection.execute(query)}
        return {state: found.get(state, 0) for state in State}


_FINAL = [state for state in State if state.final]
_CANCELLED = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED)
_BACK_IN_THE_QUEUE: dict[str, Any] = {"state": State.QUEUED, "worker": "", "lease_until": None}


async def _tell_the_end(connection: AsyncConnection, job_id: str, outcome: Outcome) -> None:
    """Note in the transaction that ends a job, after the change, that it is over."""
    await add_entries(connection, job_id, [Entry(kind="finished", body=asdict(outcome))])
    await add_delivery(connection, await _get(connection, job_id), "finished")


def _next_in_turn(limit: int, per_tenant: int) -> sa.ScalarSelect[str]:
    """Choose what runs next: by priority, then a job of each tenant in turn, then by age."""
    running = (
        sa.select(jobs.c.tenant, sa.func.count().label("count"))
        .where(jobs.c.state == State.RUNNING)
        .group_by(jobs.c.tenant)
        .subquery()
    )
    in_line = (
        sa.func.row_number()
        .over(
            partition_by=jobs.c.tenant,
            order_by=(jobs.c.priority.desc(), jobs.c.created_at, jobs.c.id),
        )
        .label("in_line")
    )
    queued = sa.select(jobs, in_line).where(jobs.c.state == State.QUEUED).subquery()
    turn = queued.c.in_line + sa.func.coalesce(running.c.count, 0)
    return (
        sa.select(queued.c.id)
        .select_from(queued.outerjoin(running, queued.c.tenant == running.c.tenant))
        .where(turn <= per_tenant)
        .order_by(queued.c.priority.desc(), turn, queued.c.created_at, queued.c.id)
        .limit(limit)
        .scalar_subquery()
    )


async def _put_back(connection: AsyncConnection, job_ids: Sequence[str], why: str) -> list[Job]:
    mine = jobs.c.id.in_(job_ids)
    await connection.execute(jobs.update().where(mine).values(_BACK_IN_THE_QUEUE))
    for job_id in job_ids:
        await add_entries(connection, job_id, [Entry(kind="retried", body={"why": why})])
    return [_job(row) for row in await connection.execute(sa.select(jobs).where(mine))]


def _held_by(worker: str) -> sa.ColumnElement[bool]:
    return (jobs.c.worker == worker) & (jobs.c.state == State.RUNNING)


async def _change(
    connection: AsyncConnection, worker: str, job_id: str, values: Mapping[str, Any]
) -> None:
    held = (jobs.c.id == job_id) & _held_by(worker)
    done = await connection.execute(jobs.update().where(held).values(dict(values)))
    if done.rowcount != 1:
        raise LeaseLost(
            f"Job {job_id} is no longer held by {worker}.",
            remedy="Stop working on it: another worker may have it.",
        )


async def _get(connection: AsyncConnection, job_id: str, tenant: str | None = None) -> Job:
    query = sa.select(jobs).where(jobs.c.id == job_id)
    if tenant is not None:
        query = query.where(jobs.c.tenant == tenant)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NoSuchJob(f"There is no job {job_id!r}.", remedy="List your jobs for their ids.")
    return _job(row)


def _job(row: sa.Row[Any]) -> Job:
    return Job(
        id=row.id,
        tenant=row.tenant,
        request=Request.model_validate(row.request),
        state=State(row.state),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        attempt=row.attempt,
        reason=Reason(row.reason) if row.reason else None,
        exit_code=row.exit_code,
        error=row.error,
        cancel_requested=row.cancel_requested,
        worker=row.worker,
        machine=row.machine,
        rung=Rung(row.rung) if row.rung else None,
    )


def _cursor(job: Job) -> str:
    place = [round(job.created_at.timestamp() * 1_000_000), job.id]
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def _parse_cursor(cursor: str) -> tuple[datetime, str]:
    try:
        microseconds, job_id = json.loads(base64.urlsafe_b64decode(cursor))
        return datetime.fromtimestamp(microseconds / 1_000_000, tz=UTC), str(job_id)
    except (ValueError, TypeError, OverflowError, OSError, binascii.Error):
        raise BadRequest(
            "The cursor is not one that a list gave out.", remedy="Start from the first page."
        ) from None
