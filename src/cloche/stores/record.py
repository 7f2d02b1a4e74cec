"""Histories in SQL: `cloche.core.record.Record`, on SQLite and PostgreSQL alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from cloche.core.errors import LeaseLost
from cloche.core.job import State
from cloche.core.record import Entry, Event
from cloche.stores.database import Database, reads, tell, writes
from cloche.stores.tables import events, jobs

_LONGEST = 16 << 20
"""More than one event ever holds."""
_TAIL_EVENTS = 200
"""How far back a tail is looked for: a bound on what one status costs."""


class Record:
    """Histories in the `events` table. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @writes
    def append(
        self, connection: sa.Connection, worker: str, job_id: str, entries: Sequence[Entry]
    ) -> int:
        held = (
            sa.select(jobs.c.id)
            .where(jobs.c.id == job_id, jobs.c.worker == worker, jobs.c.state == State.RUNNING)
            # On PostgreSQL, nobody can take the job away until this is written.
            .with_for_update()
        )
        if connection.execute(held).one_or_none() is None:
            raise LeaseLost(
                f"Job {job_id} is no longer held by {worker}.",
                remedy="Stop working on it: another worker may have it.",
            )
        return add_entries(connection, job_id, entries)

    def listening(self, job_id: str) -> contextlib.AbstractContextManager[asyncio.Event]:
        return self._database.bell.listening(job_id)

    @reads
    def events(
        self,
        connection: sa.Connection,
        job_id: str,
        *,
        after: int = 0,
        limit: int = 500,
        data: bool = True,
    ) -> Sequence[Event]:
        columns = [column for column in events.c if data or column is not events.c.data]
        query = (
            sa.select(*columns)
            .where(events.c.job_id == job_id, events.c.seq > after)
            .order_by(events.c.seq)
            .limit(limit)
        )
        return [_event(row) for row in connection.execute(query)]

    @reads
    def log(self, connection: sa.Connection, job_id: str, *, offset: int, limit: int) -> bytes:
        query = (
            sa.select(events.c.data, events.c.log_from)
            .where(events.c.job_id == job_id, events.c.log_to > offset)
            .where(events.c.log_from < offset + limit)
            # Says no more than the line above, but in the index: the rest of a long log is not
            # looked at for each page.
            .where(events.c.log_to < offset + limit + _LONGEST)
            .order_by(events.c.log_to)
        )
        found = bytearray()
        for data, start in connection.execute(query):
            found += data[max(0, offset - start) :]
        return bytes(found[:limit])

    @reads
    def log_size(self, connection: sa.Connection, job_id: str) -> int:
        return _end(connection, job_id)[1]

    @reads
    def tails(self, connection: sa.Connection, job_id: str, *, limit: int) -> Mapping[str, bytes]:
        query = (
            sa.select(events.c.body, events.c.data)
            .where(events.c.job_id == job_id, events.c.data.is_not(None))
            .order_by(events.c.seq.desc())
            .limit(_TAIL_EVENTS)
        )
        tails = {"stdout": b"", "stderr": b""}
        for body, data in connection.execute(query):
            stream = body["stream"]
            if len(tails[stream]) < limit:
                tails[stream] = (data + tails[stream])[-limit:]
        return tails


def add_entries(
    connection: sa.Connection, job_id: str, entries: Sequence[Entry], *, are_first: bool = False
) -> int:
    """Add entries within a transaction that has the job to itself."""
    seq, log_to = (0, 0) if are_first else _end(connection, job_id)
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
        connection.execute(events.insert(), rows)
        tell(connection, job_id)
    return seq


def _end(connection: sa.Connection, job_id: str) -> tuple[int, int]:
    """Return the last event's number and the size of the log."""
    query = sa.select(
        sa.func.coalesce(sa.func.max(events.c.seq), 0),
        sa.func.coalesce(sa.func.max(events.c.log_to), 0),
    ).where(events.c.job_id == job_id)
    seq, log_to = connection.execute(query).one()
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
