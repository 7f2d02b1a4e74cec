"""Opens the database: one code path for SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from cloche.core.errors import BadSettings, StoreUnavailable
from cloche.core.meters import UNMETERED, Meters

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
_BUSY_MS = 30_000
_CHANGED = "cloche.changed"


class Bell:
    """Wakes those who wait, in this process, for something to change."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[asyncio.Event]] = {}

    def ring(self, name: str) -> None:
        for listener in self._listeners.get(name, ()):
            listener.set()

    @contextlib.contextmanager
    def listening(self, name: str) -> Iterator[asyncio.Event]:
        """Return an event that is set whenever `name` has changed."""
        heard = asyncio.Event()
        self._listeners.setdefault(name, set()).add(heard)
        try:
            yield heard
        finally:
            self._listeners[name].discard(heard)
            if not self._listeners[name]:
                del self._listeners[name]


class Database:
    """A pool of connections, and the two kinds of transaction that are used on them."""

    def __init__(self, engine: AsyncEngine, meters: Meters = UNMETERED) -> None:
        self._engine = engine
        self._meters = meters
        self._reading = engine.execution_options(reads_only=True)
        self.bell = Bell()

    @classmethod
    async def open(cls, url: str, meters: Meters = UNMETERED) -> Database:
        """Connect to `sqlite:///PATH` or `postgresql://…` and migrate to today's tables.

        Raises:
            BadSettings: the address is not of a database we speak.
            StoreUnavailable: it does not answer.
        """
        database = cls(_engine(url), meters)
        try:
            async with database.write() as connection:
                await connection.run_sync(_migrate)
        except BaseException:
            await database.close()
            raise
        return database

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that only looks."""
        with _translated(self._meters):
            async with self._reading.begin() as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that may change things; it is durable when the block ends."""
        with _translated(self._meters):
            async with self._engine.begin() as connection:
                yield connection
                changed = connection.info.pop(_CHANGED, ())
        for name in changed:
            self.bell.ring(name)

    async def close(self) -> None:
        await self._engine.dispose()


def tell(connection: AsyncConnection, name: str) -> None:
    """Wake those who listen for `name`, once this transaction is durable."""
    connection.info.setdefault(_CHANGED, set()).add(name)


def _engine(address: str) -> AsyncEngine:
    try:
        url = sa.make_url(address)
    except sa.exc.ArgumentError:
        url = None
    driver = _DRIVERS.get(url.get_backend_name()) if url is not None else None
    if url is None or driver is None:
        # The address itself may hold a password: it is not repeated.
        raise BadSettings(
            "The database's address is neither sqlite:///PATH nor postgresql://….",
            remedy="Correct CLOCHE_DATABASE, or unset it for SQLite in the data folder.",
        )
    # A server may be restarted behind our back; a file may not.
    pre_ping = url.get_backend_name() == "postgresql"
    # An error is logged, and must not quote what is stored: code, variables, hashes of keys.
    engine = create_async_engine(
        url.set(drivername=driver), pool_pre_ping=pre_ping, hide_parameters=True
    )
    if engine.dialect.name == "sqlite":
        if url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        _prepare_sqlite(engine)
    return engine


def _prepare_sqlite(engine: AsyncEngine) -> None:
    @sa.event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _: object) -> None:
        # The driver would begin transactions by itself, at the wrong moment and of the wrong kind.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            f"busy_timeout = {_BUSY_MS}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @sa.event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        # A transaction that starts as a reader and then writes cannot wait for another writer:
        # SQLite fails it at once, whatever the timeout. Writers queue up from the start.
        reads_only = connection.get_execution_options().get("reads_only", False)
        connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")


def _migrate(connection: sa.Connection) -> None:
    from alembic import command  # noqa: PLC0415 - once a start, and slow to load
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", "cloche:stores/migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


@contextlib.contextmanager
def _translated(meters: Meters) -> Iterator[None]:
    try:
        yield
    except (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.TimeoutError, OSError) as error:
        meters.store_failed()
        raise StoreUnavailable(
            f"The database does not answer: {type(error).__name__}.",
            remedy="Check that it runs and has room; the request can then be made again.",
        ) from error
