"""The side that has machines: jobs, sandboxes and the pool, within a server or on its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import platform
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from cloche.app import Host, Machines
from cloche.core.addresses import Rules
from cloche.core.errors import BadSettings, OperatorError
from cloche.core.image import Image
from cloche.core.meters import UNMETERED, Meters
from cloche.core.spec import SandboxSpec
from cloche.jobs.sandboxes import Sandboxes
from cloche.jobs.watchdog import Ceilings
from cloche.jobs.worker import Worker
from cloche.observe import traces
from cloche.sandbox import outfit
from cloche.sandbox.dialling import Dialler
from cloche.sandbox.networks import Networks
from cloche.sandbox.pool import Pool
from cloche.settings import Settings
from cloche.stores.blobs import Blobs
from cloche.stores.database import Database
from cloche.stores.queue import Queue
from cloche.stores.record import Record
from cloche.stores.standings import Standings


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A host that has what machines need, and a data folder that is ours alone."""

    name: str
    host: Host
    image: Image
    runtime: str
    """The program that starts machines, with its version."""

    @property
    def rung(self) -> str:
        return self.host.backend.rung


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """What servers and workers share."""

    database: Database
    blobs: Blobs
    queue: Queue
    standings: Standings


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What is at work on a place's machines."""

    worker: Worker
    sandboxes: Sandboxes
    pool: Pool
    tasks: tuple[asyncio.Task[None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """A worker that is up."""

    name: str
    rung: str
    slots: int
    database: str
    """Which one it is, without its password."""


async def work(settings: Settings, *, on_ready: Callable[[Working], Awaitable[None]]) -> None:
    """Take jobs until cancelled; then stop in order, with the machines of running jobs alive.

    Raises:
        BadSettings: the settings do not go together.
        OperatorError: the data folder is in use.
        BackendUnavailable, ImageMissing, ImageCorrupt: this host cannot start a machine.
        StoreUnavailable: the database or the blob store does not answer.
    """
    if not settings.slots:
        raise BadSettings(
            "A worker with CLOCHE_SLOTS=0 would never take a job.",
            remedy="Set it to how many jobs this host can run at once, or unset it.",
        )
    async with (
        traces.exported(os.environ),
        place(settings) as here,
        stores(settings) as shared,
        at_work(settings, here, shared) as crew,
    ):
        await on_ready(
            Working(
                name=here.name,
                rung=here.rung,
                slots=settings.slots,
                database=_described(settings.database_address),
            )
        )
        ended, _ = await asyncio.wait(crew.tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:  # None ends by itself unless it failed.
            task.result()


@contextlib.asynccontextmanager
async def place(settings: Settings) -> AsyncIterator[Place]:
    """Hold the data folder, and make sure that machines can be started here."""
    _allow_many_files()
    with _alone(settings.data):
        host = Host.from_settings(settings)
        try:
            runtime = await host.backend.check()
            yield Place(
                name=_name(settings.data), host=host, image=host.image("base"), runtime=runtime
            )
        finally:
            host.backend.close()


@contextlib.asynccontextmanager
async def stores(settings: Settings, meters: Meters = UNMETERED) -> AsyncIterator[Stores]:
    """Open what is shared."""
    blobs = await Blobs.open_at(settings.blob_address)
    database = await Database.open(settings.database_address, meters)
    try:
        yield Stores(
            database=database,
            blobs=blobs,
            queue=Queue(database, settings.quota, meters=meters),
            standings=Standings(database, settings.quota),
        )
    finally:
        await database.close()


@contextlib.asynccontextmanager
async def at_work(
    settings: Settings, here: Place, shared: Stores, meters: Meters = UNMETERED
) -> AsyncIterator[Crew]:
    """Take jobs, see to standing sandboxes and keep the pool full, for the length of a block."""
    backend, queue, standings = here.host.backend, shared.queue, shared.standings
    pool = Pool(backend, SandboxSpec(), here.image, size=settings.pool_size, meters=meters)
    machines = Machines(here.host, pool, meters)
    sandboxes = Sandboxes(standings, queue, machines, home=here.name)
    networks = Networks(
        Dialler(Rules(settings.allow_addresses)),
        presets=settings.network_presets,
        bundle=await outfit.read_bundle(settings.ca_bundle),
    )
    worker = Worker(
        queue,
        Record(shared.database),
        machines,
        sandboxes,
        name=here.name,
        slots=settings.slots,
        per_tenant=settings.jobs_per_tenant,
        ceilings=Ceilings(silent_s=settings.max_silent_s, cpu_s=settings.max_cpu_s),
        blobs=shared.blobs,
        networks=networks,
    )
    standing = {standing.id for standing in await standings.standing(here.name)}
    await backend.sweep(keep=sorted(await queue.machines() | standing))
    pool.start()
    try:
        tasks = (
            asyncio.create_task(worker.run(), name="worker"),
            asyncio.create_task(sandboxes.run(), name="sandboxes"),
        )
        async with until_done(tasks):
            yield Crew(worker=worker, sandboxes=sandboxes, pool=pool, tasks=tasks)
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def until_done(tasks: tuple[asyncio.Task[None], ...]) -> AsyncIterator[None]:
    """Stop tasks at the end of a block, and wait until they have stopped."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _allow_many_files() -> None:
    """Use all the open files we may: each connection of a machine takes two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def make_folder(data: Path) -> None:
    """Make the data folder, if it is not there."""
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(data, error) from None


@contextlib.contextmanager
def _alone(data: Path) -> Iterator[None]:
    """Hold the data folder: two workers on one would sweep each other's machines."""
    make_folder(data)
    try:
        lock = os.open(data / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_writable(data, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OperatorError(
            f"Another server or worker uses the data folder {data}.",
            remedy="Stop it first, or give this one a folder of its own with --data.",
        ) from None
    else:
        yield
    finally:
        os.close(lock)


def _not_writable(data: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"The data folder {data} cannot be written: {error.strerror}.",
        remedy="Make it writable, or choose another with --data or CLOCHE_DATA.",
    )


def _name(data: Path) -> str:
    """Name the worker by its host and data folder, so that a restart knows its own jobs."""
    folder = hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:12]
    return f"{platform.node()[:40]}-{folder}"


def _described(address: str) -> str:
    """Name a database without what opens it: a password may also be among its options."""
    url = sa.make_url(address)
    if url.get_backend_name() == "sqlite":
        return f"SQLite in {url.database}"
    where = f" at {url.host}" if url.host else ""
    return f"PostgreSQL{where}, database {url.database}"
