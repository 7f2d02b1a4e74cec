"""Histories in SQL: `cloche.core.record.Record`, on SQLite and PostgreSQL alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from cloche.core.errors import LeaseLost
from cloche.core.job import State
from cloche.core.record import Entry, Event
from cloche.stores.database import Database, tell
from cloche.stores.tables import events, jobs

_TAIL_EVENTS = 200
"""How far back a tail is looked for: a bound on what one status costs."""


class Record:
    """Histories in the `events` table. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, worker: str, job_id: str, entries: Sequence[Entry]) -> int:
        held = (
            sa.select(jobs.c.id)
            .where(jobs.c.id == job_id, jobs.c.worker == worker, jobs.c.state == State.RUNNING)
            # On PostgreSQL, nobody can take the job away until this is written.
            .with_for_update()
        )
        async with self._database.write() as connection:
            if (await connection.execute(held)).one_or_none() is None:
                raise LeaseLost(
                    f"Job {job_id} is no longer held by {worker}.",
                    remedy="Stop working on it: another worker may have it.",
                )
            return await add_entries(connection, job_id, entries)

    def listening(self, job_id: str) -> contextlib.AbstractContextManager[asyncio.Event]:
        return self._database.bell.listening(job_id)

    async def events(
        self, job_id: str, *, after: int = 0, limit: int = 500, data: bool = True
    ) -> Sequence[Event]:
        columns = [column for column in events.c if data or column is not events.c.data]
        query = (
            sa.select(*columns)
            .where(events.c.job_id == job_id, events.c.seq > after)
            .order_by(events.c.seq)
            .limit(limit)
        )
        async with self._database.read() as connection:
            return [_event(row) for row in await connection.execute(query)]

    async def log(self, job_id: str, *, offset: int, limit: int) -> bytes:
        query = (
            sa.select(events.c.data, events.c.log_from)
            .where(events.c.job_id == job_id, events.c.log_to > offset)
            .where(events.c.log_from < offset + limit)
            .order_by(events.c.log_to)
        )
        found = bytearray()
        async with self._database.read() as connection:
            for data, start in await connection.execute(query):
                found += data[max(0, offset - start) :]
        return bytes(found[:limit])

    async def log_size(self, job_id: str) -> int:
        async with self._database.read() as connection:
            return (await _end(connection, job_id))[1]

    async def tails(self, job_id: str, *, limit: int) -> Mapping[str, bytes]:
        query = (
            sa.select(events.c.body, events.c.data)
            .where(events.c.job_id == job_id, events.c.data.is_not(None))
            .order_by(events.c.seq.desc())
            .limit(_TAIL_EVENTS)
        )
        tails = {"stdout": b"", "stderr": b""}
        async with self._database.read() as connection:
            for body, data in await connection.execute(query):
                stream = body["stream"]
                if len(tails[stream]) < limit:
                    tails[stream] = (data + tails[stream])[-limit:]
        return tails


async def add_entries(connection: AsyncConnection, job_id: str, entries: Sequence[Entry]) -> int:
    """Add entries within a transaction that has the job to itself."""
    seq, log_to = await _end(connection, job_id)
    rows: list[dict[str, Any]] = []
    now = datetime.now(UTC)
    for entry in entries:
        seq += 1
        log_from, log_to = log_to, log_to + len(entry.data)
        is_output = bool(entry.data)
        rows.append(
            {
                "job_id": job_id,
                "seq": seq,
                "at": now,
                "kind": entry.kind,
                "body": dict(entry.body),
                "data": entry.data if is_output else None,
                "log_from": log_from if is_output else None,
                "log_to": log_to if is_output else None,
            }
        )
    if rows:
        await connection.execute(events.insert(), rows)
        tell(connection, job_id)
    return seq


async def _end(connection: AsyncConnection, job_id: str) -> tuple[int, int]:
    """Return the last event's number and the size of the log."""
    query = sa.select(
        sa.func.coalesce(sa.func.max(events.c.seq), 0),
        sa.func.coalesce(sa.func.max(events.c.log_to), 0),
    ).where(events.c.job_id == job_id)
    seq, log_to = (await connection.execute(query)).one()
    return seq, log_to


def _event(row: sa.Row[Any]) -> Event:
    return Event(
        seq=row.seq,
        at=row.at,
        kind=row.kind,
        body=row.body,
        data=getattr(row, "data", None) or b"",
        log_offset=row.log_from,
        size=0 if row.log_to is None else row.log_to - row.log_from,
    )
