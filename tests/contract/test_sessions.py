"""One set of checks for the sessions of browsers, on every database they are kept in."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from cloche.core.access import Key, Role
from cloche.core.session import LINK_LIFE, SESSION_AT_MOST, SESSION_LIFE
from cloche.stores.access import Access
from cloche.stores.database import Database
from cloche.stores.sessions import Sessions
from cloche.stores.tables import browser_sessions, login_links

SECOND = timedelta(seconds=1)


@pytest.fixture
def sessions(database: Database) -> Sessions:
    return Sessions(database)


@pytest.fixture
async def key(database: Database) -> Key:
    key, _ = await Access(database).create_key(tenant="a", role=Role.MEMBER, name="")
    return key


async def link(sessions: Sessions, key: Key) -> str:
    made = await sessions.link(key_id=key.id, tenant=key.tenant, role=key.role)
    return made.token


async def open_session(sessions: Sessions, key: Key) -> str:
    opened = await sessions.open(await link(sessions, key))
    assert opened is not None
    return opened[0]


async def move(database: Database, table: sa.Table, **moments: datetime) -> None:
    await database.write(lambda connection: connection.execute(table.update().values(**moments)))


async def test_a_link_opens_one_session_of_its_key(sessions: Sessions, key: Key) -> None:
    token = await link(sessions, key)
    opened = await sessions.open(token)
    assert opened is not None
    secret, session = opened

    found = await sessions.identify(secret)

    assert found == session
    assert found is not None
    assert (found.key_id, found.tenant, found.role) == (key.id, "a", Role.MEMBER)
    assert await sessions.open(token) is None, "a link worked twice"


async def test_of_many_who_use_a_link_at_once_one_gets_in(sessions: Sessions, key: Key) -> None:
    token = await link(sessions, key)

    opened = await asyncio.gather(*(sessions.open(token) for _ in range(10)))

    assert sum(result is not None for result in opened) == 1


async def test_neither_tokens_nor_secrets_are_stored(
    database: Database, sessions: Sessions, key: Key
) -> None:
    unused = await link(sessions, key)
    secret = await open_session(sessions, key)

    def rows(connection: sa.Connection) -> str:
        tables = (login_links, browser_sessions)
        return str([connection.execute(sa.select(table)).all() for table in tables])

    kept = await database.read(rows)
    assert unused not in kept
    assert secret not in kept


async def test_an_old_link_opens_nothing(database: Database, sessions: Sessions, key: Key) -> None:
    token = await link(sessions, key)
    await move(database, login_links, expires_at=datetime.now(UTC) - SECOND)

    assert await sessions.open(token) is None


@pytest.mark.parametrize("made_up", ["", "x", "é" * 300])
async def test_what_was_never_given_out_opens_nothing(sessions: Sessions, made_up: str) -> None:
    assert await sessions.open(made_up) is None
    assert await sessions.identify(made_up) is None


async def test_a_session_lasts_on_while_it_is_used_but_not_forever(
    database: Database, sessions: Sessions, key: Key
) -> None:
    secret = await open_session(sessions, key)
    now = datetime.now(UTC)
    await move(database, browser_sessions, expires_at=now + timedelta(hours=1))
    used = await sessions.identify(secret)
    assert used is not None
    assert used.expires_at > now + SESSION_LIFE - SECOND

    opened = now - SESSION_AT_MOST + timedelta(hours=1)
    await move(database, browser_sessions, created_at=opened, expires_at=now + SECOND * 60)
    used = await sessions.identify(secret)
    assert used is not None
    assert used.expires_at <= now + timedelta(hours=1)

    await move(database, browser_sessions, expires_at=now - SECOND)
    assert await sessions.identify(secret) is None


async def test_a_session_that_was_closed_is_over(sessions: Sessions, key: Key) -> None:
    secret, other = await open_session(sessions, key), await open_session(sessions, key)

    await sessions.close(secret)
    await sessions.close(secret)

    assert await sessions.identify(secret) is None
    assert await sessions.identify(other) is not None


async def test_links_and_sessions_end_with_their_key(
    database: Database, sessions: Sessions, key: Key
) -> None:
    token, secret = await link(sessions, key), await open_session(sessions, key)

    await Access(database).revoke(key.id)

    assert await sessions.open(token) is None
    assert await sessions.identify(secret) is None


async def test_what_is_too_old_is_removed(database: Database, sessions: Sessions, key: Key) -> None:
    await link(sessions, key)
    await open_session(sessions, key)
    for table in (login_links, browser_sessions):
        await move(database, table, expires_at=datetime.now(UTC) - LINK_LIFE)

    await link(sessions, key)

    def count(connection: sa.Connection) -> list[int]:
        totals = [
            sa.select(sa.func.count()).select_from(t) for t in (login_links, browser_sessions)
        ]
        return [connection.execute(total).scalar_one() for total in totals]

    assert await database.read(count) == [1, 0]
