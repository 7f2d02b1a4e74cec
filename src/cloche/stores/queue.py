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

from cloche.core.access import Caller
from cloche.core.errors import BadRequest, IdempotencyConflict, JobNotOver, LeaseLost, NoSuchJob
from cloche.core.job import Job, Outcome, Reason, Request, State
from cloche.core.meters import UNMETERED, Meters
from cloche.core.queue import Filter, Page, Submitted
from cloche.core.quota import Quota
from cloche.core.record import Entry
from cloche.core.rung import Rung
from cloche.stores import quotas
from cloche.stores.access import add_audit
from cloche.stores.database import Database, reads, writes
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

    async def submit(
        self,
        tenant: str,
        request: Request,
        *,
        by: Caller | None = None,
        traceparent: str = "",
    ) -> Submitted:
        try:
            return await self._submit(tenant, request, by, traceparent)
        except sa.exc.IntegrityError:
            return await self._earlier(tenant, request)

    @writes
    def _submit(
        self,
        connection: sa.Connection,
        tenant: str,
        request: Request,
        by: Caller | None,
        traceparent: str,
    ) -> Submitted:
        job = Job(
            id=secrets.token_hex(8),
            tenant=tenant,
            request=request,
            state=State.QUEUED,
            created_at=datetime.now(UTC),
        )
        row = {
            "id": job.id,
            "tenant": tenant,
            "request": request.model_dump(mode="json", exclude_defaults=True),
            "labels": dict(request.labels),
            "idempotency_key": request.idempotency_key,
            "state": job.state,
            "priority": request.priority,
            "created_at": job.created_at,
        }
        quotas.lock(connection, tenant)
        connection.execute(jobs.insert().values(row))
        # After the insert: a job that was submitted before needs no room.
        quotas.admit(connection, tenant, request.limits, self._quota)
        body = {"traceparent": traceparent} if traceparent else {}
        add_entries(connection, job.id, [Entry(kind="submitted", body=body)], are_first=True)
        if by is not None:
            add_audit(connection, by, "job.create", job.id)
        return Submitted(job=job, created=True)

    @reads
    def _earlier(self, connection: sa.Connection, tenant: str, request: Request) -> Submitted:
        """Return the job that the same key made before."""
        same = (jobs.c.tenant == tenant) & (jobs.c.idempotency_key == request.idempotency_key)
        found = connection.execute(sa.select(jobs).where(same)).one()
        job = _job(found)
        if job.request != request:
            raise IdempotencyConflict(
                f"The idempotency key {request.idempotency_key!r} was used for another request.",
                remedy="Use a new key for a new request.",
            )
        return Submitted(job=job, created=False)

    @reads
    def get(self, connection: sa.Connection, job_id: str, *, tenant: str | None = None) -> Job:
        return _get(connection, job_id, tenant)

    @reads
    def list(
        self,
        connection: sa.Connection,
        *,
        tenant: str | None,
        where: Filter,
        cursor: str | None = None,
        limit: int = 50,
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
        rows = connection.execute(query.limit(limit + 1)).all()
        found = tuple(_job(row) for row in rows[:limit])
        return Page(jobs=found, next_cursor=_cursor(found[-1]) if len(rows) > limit else None)

    async def acquire(
        self, worker: str, *, lease: timedelta, limit: int, per_tenant: int
    ) -> Sequence[Job]:
        taken = await self._acquire(worker, lease, limit, per_tenant)
        for job in taken:
            self._meters.job_started(job)
        return taken

    @writes
    def _acquire(
        self,
        connection: sa.Connection,
        worker: str,
        lease: timedelta,
        limit: int,
        per_tenant: int,
    ) -> Sequence[Job]:
        now = datetime.now(UTC)
        # The lock is PostgreSQL's; SQLite has one writer at a time as it is.
        ids = (
            sa.select(jobs.c.id)
            .where(jobs.c.id.in_(_next_in_turn(limit, per_tenant)))
            .where(jobs.c.state == State.QUEUED)
            .with_for_update(skip_locked=True)
        )
        chosen = connection.execute(ids).scalars().all()
        if not chosen:
            return []
        connection.execute(
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
        found = [_job(row) for row in connection.execute(in_turn)]
        for job in found:
            body = {"worker": worker, "attempt": job.attempt}
            add_entries(connection, job.id, [Entry(kind="started", body=body)])
            if job.attempt == 1:  # A restart of ours is no news.
                add_delivery(connection, job, "started")
        return found

    @writes
    def renew(
        self, connection: sa.Connection, worker: str, job_ids: Sequence[str], *, lease: timedelta
    ) -> set[str]:
        held = jobs.c.id.in_(job_ids) & _held_by(worker)
        until = datetime.now(UTC) + lease
        connection.execute(jobs.update().where(held).values(lease_until=until))
        return set(connection.execute(sa.select(jobs.c.id).where(held)).scalars())

    @writes
    def place(
        self,
        connection: sa.Connection,
        worker: str,
        job_id: str,
        *,
        machine: str,
        rung: Rung,
        entry: Entry,
    ) -> None:
        _change(connection, worker, job_id, {"machine": machine, "rung": rung})
        add_entries(connection, job_id, [entry])

    async def finish(
        self,
        worker: str,
        job_id: str,
        outcome: Outcome,
        *,
        entries: Sequence[Entry] = (),
        cpu_s: float = 0.0,
        kept_bytes: int = 0,
    ) -> Job:
        job = await self._finish(worker, job_id, outcome, entries, cpu_s, kept_bytes)
        self._meters.job_finished(job)
        return job

    @writes
    def _finish(
        self,
        connection: sa.Connection,
        worker: str,
        job_id: str,
        outcome: Outcome,
        entries: Sequence[Entry],
        cpu_s: float,
        kept_bytes: int,
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
        _change(connection, worker, job_id, values)
        job = _tell_the_end(connection, job_id, outcome, entries)
        quotas.charge(connection, job.tenant, cpu_s)
        if kept_bytes:
            quotas.keep(connection, job.tenant, job_id, kept_bytes)
        return job

    @writes
    def release(self, connection: sa.Connection, worker: str, job_id: str) -> None:
        held = (jobs.c.id == job_id) & _held_by(worker)
        connection.execute(jobs.update().where(held).values(_BACK_IN_THE_QUEUE))

    async def cancel(self, job_id: str, *, tenant: str | None = None) -> Job:
        job, ended = await self._cancel(job_id, tenant)
        if ended:
            self._meters.job_finished(job)
        return job

    @writes
    def _cancel(
        self, connection: sa.Connection, job_id: str, tenant: str | None
    ) -> tuple[Job, bool]:
        """Return the job as it is now, and whether this ended it."""
        _get(connection, job_id, tenant)
        mine = jobs.c.id == job_id
        connection.execute(
            jobs.update()
            .where(mine & (jobs.c.state == State.RUNNING))
            .values(cancel_requested=True)
        )
        # One that ran before, and may have a machine yet, is ended by a worker.
        fresh = mine & (jobs.c.state == State.QUEUED) & (jobs.c.machine == "")
        ended = connection.execute(
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
            _tell_the_end(connection, job_id, _CANCELLED)
        waiting = mine & (jobs.c.state == State.QUEUED)
        connection.execute(jobs.update().where(waiting).values(cancel_requested=True))
        return _get(connection, job_id), bool(ended.rowcount)

    @reads
    def cancelled(self, connection: sa.Connection, worker: str) -> set[str]:
        query = sa.select(jobs.c.id).where(_held_by(worker), jobs.c.cancel_requested)
        return set(connection.execute(query).scalars())

    @reads
    def machines(self, connection: sa.Connection) -> set[str]:
        waiting = jobs.c.state.in_([State.QUEUED, State.RUNNING])
        query = sa.select(jobs.c.machine).where(waiting, jobs.c.machine != "")
        return set(connection.execute(query).scalars())

    @reads
    def over_before(
        self, connection: sa.Connection, moment: datetime, *, limit: int
    ) -> Sequence[str]:
        query = (
            sa.select(jobs.c.id)
            .where(jobs.c.finished_at < moment, jobs.c.state.in_(_FINAL))
            .order_by(jobs.c.finished_at)
            .limit(limit)
        )
        return connection.execute(query).scalars().all()

    @reads
    def known(self, connection: sa.Connection, job_ids: Sequence[str]) -> set[str]:
        query = sa.select(jobs.c.id).where(jobs.c.id.in_(job_ids))
        return set(connection.execute(query).scalars())

    @writes
    def reap(self, connection: sa.Connection) -> Sequence[Job]:
        expired = (jobs.c.state == State.RUNNING) & (jobs.c.lease_until < datetime.now(UTC))
        ids = sa.select(jobs.c.id).where(expired).with_for_update(skip_locked=True)
        chosen = connection.execute(ids).scalars().all()
        return _put_back(connection, chosen, "its worker fell silent")

    @writes
    def delete(self, connection: sa.Connection, job_id: str, *, tenant: str | None = None) -> None:
        job = _get(connection, job_id, tenant)
        if not job.state.final:
            raise JobNotOver(
                f"Job {job_id} is {job.state}.", remedy="Cancel it first, or wait for its end."
            )
        gone = connection.execute(jobs.delete().where(jobs.c.id == job_id))
        if gone.rowcount == 0:
            _get(connection, job_id, tenant)  # Someone was faster: there is none.

    @reads
    def counts(self, connection: sa.Connection) -> Mapping[State, int]:
        query = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        found = {State(state): count for state, count in connection.execute(query)}
        return {state: found.get(state, 0) for state in State}


_FINAL = [state for state in State if state.final]
_CANCELLED = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED)
_BACK_IN_THE_QUEUE: dict[str, Any] = {"state": State.QUEUED, "worker": "", "lease_until": None}


def _tell_the_end(
    connection: sa.Connection, job_id: str, outcome: Outcome, before: Sequence[Entry] = ()
) -> Job:
    """Note in the transaction that ends a job, after the change, that it is over."""
    finished = Entry(kind="finished", body=asdict(outcome))
    add_entries(connection, job_id, [*before, finished])
    job = _get(connection, job_id)
    add_delivery(connection, job, "finished")
    return job


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


def _put_back(connection: sa.Connection, job_ids: Sequence[str], why: str) -> list[Job]:
    mine = jobs.c.id.in_(job_ids)
    connection.execute(jobs.update().where(mine).values(_BACK_IN_THE_QUEUE))
    for job_id in job_ids:
        add_entries(connection, job_id, [Entry(kind="retried", body={"why": why})])
    return [_job(row) for row in connection.execute(sa.select(jobs).where(mine))]


def _held_by(worker: str) -> sa.ColumnElement[bool]:
    return (jobs.c.worker == worker) & (jobs.c.state == State.RUNNING)


def _change(connection: sa.Connection, worker: str, job_id: str, values: Mapping[str, Any]) -> None:
    held = (jobs.c.id == job_id) & _held_by(worker)
    done = connection.execute(jobs.update().where(held).values(dict(values)))
    if done.rowcount != 1:
        raise LeaseLost(
            f"Job {job_id} is no longer held by {worker}.",
            remedy="Stop working on it: another worker may have it.",
        )


def _get(connection: sa.Connection, job_id: str, tenant: str | None = None) -> Job:
    query = sa.select(jobs).where(jobs.c.id == job_id)
    if tenant is not None:
        query = query.where(jobs.c.tenant == tenant)
    row = connection.execute(query).one_or_none()
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
