"""Opens the database: one code path for SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from cloche.core.errors import BadSettings, StoreUnavailable
from cloche.core.meters import UNMETERED, Meters

T = TypeVar("T")
P = ParamSpec("P")

_READERS: Final = 4
_BUSY_MS: Final = 30_000
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
    """Runs transactions: plain functions of a connection, off the event loop or on it."""

    def __init__(self, engine: _Sqlite | _Postgresql, meters: Meters = UNMETERED) -> None:
        self._engine = engine
        self._meters = meters
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
            await database.write(_migrate)
        except BaseException:
            await database.close()
            raise
        return database

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Do `work` in a transaction that only looks."""
        with _translated(self._meters):
            return await self._engine.run(work, writes=False)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Do `work` in a transaction that may change things; it is durable on return.

        Whoever is cancelled meanwhile does not learn whether it was done.
        """

        def noted(connection: sa.Connection) -> tuple[T, frozenset[str]]:
            connection.info.pop(_CHANGED, None)  # Of a transaction that failed.
            return work(connection), frozenset(connection.info.pop(_CHANGED, ()))

        with _translated(self._meters):
            result, changed = await self._engine.run(noted, writes=True)
        for name in changed:
            self.bell.ring(name)
        return result

    async def close(self) -> None:
        await self._engine.close()


class _Store(Protocol):
    @property
    def _database(self) -> Database: ...


S = TypeVar("S", bound=_Store)
Method = Callable[Concatenate[S, sa.Connection, P], T]
AsyncMethod = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def reads(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
    """Make a method that is given a connection one that runs in a transaction of its own."""

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.read(
            lambda connection: method(self, connection, *args, **kwargs)
        )

    return call


def writes(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
    """The same, for a transaction that may change things."""

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.write(
            lambda connection: method(self, connection, *args, **kwargs)
        )

    return call


def tell(connection: sa.Connection, name: str) -> None:
    """Wake those who listen for `name`, once this transaction is durable."""
    connection.info.setdefault(_CHANGED, set()).add(name)


class _Sqlite:
    """A file. A transaction is one visit to a thread: there are far fewer switches that way
    than with a thread to each statement, and a switch costs more than a statement."""

    def __init__(self, url: sa.URL) -> None:
        if url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        # An error is logged, and must not quote what is stored: code, variables, hashes of keys.
        self._engine = sa.create_engine(url, hide_parameters=True, pool_size=_READERS + 1)
        _prepare_sqlite(self._engine)
        self._looking = self._engine.execution_options(reads_only=True)
        # One writer: SQLite has no room for two, and here they wait in line without polling.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sqlite-writer")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="sqlite-reader")

    async def run(self, work: Callable[[sa.Connection], T], *, writes: bool) -> T:
        engine = self._engine if writes else self._looking

        def transaction() -> T:
            with engine.begin() as connection:
                return work(connection)

        threads = self._writer if writes else self._readers
        return await asyncio.get_running_loop().run_in_executor(threads, transaction)

    async def close(self) -> None:
        for threads in (self._writer, self._readers):
            await asyncio.to_thread(threads.shutdown)
        self._engine.dispose()


class _Postgresql:
    """A server, which may be restarted behind our back."""

    def __init__(self, url: sa.URL) -> None:
        address = url.set(drivername="postgresql+asyncpg")
        self._engine = create_async_engine(address, pool_pre_ping=True, hide_parameters=True)

    async def run(self, work: Callable[[sa.Connection], T], *, writes: bool) -> T:
        async with self._engine.begin() as connection:
            return await connection.run_sync(work)

    async def close(self) -> None:
        await self._engine.dispose()


_ENGINES: Final[Mapping[str, type[_Sqlite] | type[_Postgresql]]] = {
    "sqlite": _Sqlite,
    "postgresql": _Postgresql,
}


def _engine(address: str) -> _Sqlite | _Postgresql:
    try:
        url = sa.make_url(address)
    except sa.exc.ArgumentError:
        url = None
    kind = _ENGINES.get(url.get_backend_name()) if url is not None else None
    if url is None or kind is None:
        # The address itself may hold a password: it is not repeated.
        raise BadSettings(
            "The database's address is neither sqlite:///PATH nor postgresql://….",
            remedy="Correct CLOCHE_DATABASE, or unset it for SQLite in the data folder.",
        )
    return kind(url)


def _prepare_sqlite(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
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

    @sa.event.listens_for(engine, "begin")
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
