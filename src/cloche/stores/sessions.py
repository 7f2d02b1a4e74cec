"""Links and sessions in SQL: `cloche.core.session.Sessions`, on SQLite and PostgreSQL alike."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from cloche.core.access import ENVIRONMENT, Role
from cloche.core.session import LINK_LIFE, SESSION_AT_MOST, SESSION_LIFE, Link, Session
from cloche.stores.database import Database, reads, writes
from cloche.stores.tables import browser_sessions, keys, login_links

_TOUCH = timedelta(minutes=5)
"""A session's end moves in steps of this, so that reading does not cost a write each time."""


class Sessions:
    """Both as hashes. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @writes
    def link(self, connection: sa.Connection, *, key_id: str, tenant: str, role: Role) -> Link:
        now = datetime.now(UTC)
        link = Link(token=secrets.token_urlsafe(32), role=role, expires_at=now + LINK_LIFE)
        row = {
            "hash": _hash(link.token),
            "key_id": key_id,
            "tenant": tenant,
            "role": role,
            "expires_at": link.expires_at,
        }
        for table in (login_links, browser_sessions):
            connection.execute(table.delete().where(table.c.expires_at <= now))
        connection.execute(login_links.insert().values(row))
        return link

    @writes
    def open(self, connection: sa.Connection, token: str) -> tuple[str, Session] | None:
        now = datetime.now(UTC)
        mine = login_links.c.hash == _hash(token)
        row = (
            connection.execute(sa.select(login_links).where(mine, *_good(login_links)))
        ).one_or_none()
        # Of two that come at once, one deletes it.
        if row is None or not connection.execute(login_links.delete().where(mine)).rowcount:
            return None
        secret = secrets.token_urlsafe(32)
        values = {
            "key_id": row.key_id,
            "tenant": row.tenant,
            "role": row.role,
            "expires_at": now + SESSION_LIFE,
        }
        connection.execute(
            browser_sessions.insert().values(hash=_hash(secret), created_at=now, **values)
        )
        return secret, Session(**{**values, "role": Role(row.role)})

    async def identify(self, secret: str) -> Session | None:
        mine = browser_sessions.c.hash == _hash(secret)
        row = await self._find(mine)
        if row is None:
            return None
        expires_at = min(datetime.now(UTC) + SESSION_LIFE, row.created_at + SESSION_AT_MOST)
        if expires_at - row.expires_at < _TOUCH:
            return _session(row, row.expires_at)
        await self._extend(mine, expires_at)
        return _session(row, expires_at)

    @reads
    def _find(self, connection: sa.Connection, mine: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
        query = sa.select(browser_sessions).where(mine, *_good(browser_sessions))
        return connection.execute(query).one_or_none()

    @writes
    def _extend(
        self, connection: sa.Connection, mine: sa.ColumnElement[bool], expires_at: datetime
    ) -> None:
        connection.execute(browser_sessions.update().where(mine).values(expires_at=expires_at))

    @writes
    def close(self, connection: sa.Connection, secret: str) -> None:
        mine = browser_sessions.c.hash == _hash(secret)
        connection.execute(browser_sessions.delete().where(mine))


def _good(table: sa.Table) -> tuple[sa.ColumnElement[bool], ...]:
    """Tell what is neither too old nor of a key that was revoked."""
    key = sa.exists().where(keys.c.id == table.c.key_id, keys.c.revoked_at.is_(None))
    return (
        table.c.expires_at > datetime.now(UTC),
        # A key of the environment is in no table: whether it is in force is the server's to say.
        table.c.key_id.startswith(ENVIRONMENT, autoescape=True) | key,
    )


def _session(row: sa.Row[Any], expires_at: datetime) -> Session:
    return Session(key_id=row.key_id, tenant=row.tenant, role=Role(row.role), expires_at=expires_at)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
