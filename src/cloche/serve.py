"""The server: API and worker in one process, put together from the settings."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from cloche import __version__
from cloche.api.auth import LOOPBACK, environment
from cloche.api.server import create_app
from cloche.api.services import Services
from cloche.api.vitals import Vitals
from cloche.app import Host, Machines
from cloche.core.access import Role
from cloche.core.addresses import Rules
from cloche.core.errors import BadSettings, OperatorError
from cloche.core.spec import SandboxSpec
from cloche.jobs.census import Census
from cloche.jobs.outbound import Outbound
from cloche.jobs.sandboxes import Sandboxes
from cloche.jobs.watchdog import Ceilings
from cloche.jobs.webhooks import Sender, key_of, new_secret
from cloche.jobs.worker import Worker
from cloche.observe import traces
from cloche.observe.metrics import Metrics
from cloche.sandbox import outfit
from cloche.sandbox.dialling import Dialler
from cloche.sandbox.networks import Networks
from cloche.sandbox.pool import Pool
from cloche.settings import Settings
from cloche.stores.access import Access
from cloche.stores.blobs import Blobs
from cloche.stores.database import Database
from cloche.stores.outbox import Outbox
from cloche.stores.queue import Queue
from cloche.stores.quotas import Quotas
from cloche.stores.record import Record
from cloche.stores.sessions import Sessions
from cloche.stores.standings import Standings
from cloche.stores.uploads import Uploads
from cloche.upkeep import retention

_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - recognised, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that is up."""

    url: str
    key_file: Path | None
    rung: str
    runtime: str
    """The program that starts machines, with its version."""
    pool_size: int
    link: Callable[[], Awaitable[str | None]]
    """Make a link that lets one browser in; None when none is needed."""


async def serve(
    settings: Settings, *, host: str, port: int, on_ready: Callable[[Running], Awaitable[None]]
) -> None:
    """Serve until cancelled; then stop in order, with the machines of running jobs alive.

    Raises:
        BadSettings: the settings do not go together.
        OperatorError: the data folder is in use, or the port is taken.
        StoreUnavailable: the database or the blob store does not answer.
    """
    check_door(settings, host)
    _allow_many_files()
    with listening(host, port) as listener:
        async with (
            traces.exported(os.environ),
            _services(settings, host) as (services, key_file, runtime),
        ):
            config = uvicorn.Config(
                create_app(services), log_config=None, access_log=False, lifespan="off"
            )
            server = _Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            bound = listener.getsockname()[1]
            url = f"http://{_reached_at(host)}:{bound}"
            running = Running(
                url=url,
                key_file=key_file,
                rung=services.rung,
                runtime=runtime,
                pool_size=settings.pool_size,
                link=functools.partial(_link, services, key_file, url),
            )
            try:
                await on_ready(running)
                await asyncio.shield(serving)
            finally:
                server.should_exit = True
                await serving


def check_door(settings: Settings, host: str) -> None:
    """Raise `BadSettings` if the server would be open to anyone who can reach it."""
    if settings.auth == "off" and host not in LOOPBACK:
        raise BadSettings(
            f"CLOCHE_AUTH=off on {host} would let anyone who can reach it run code here.",
            remedy="Bind to 127.0.0.1, or leave authentication on.",
        )


def _allow_many_files() -> None:
    """Use all the open files we may: each connection of a machine takes two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to whoever runs us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _services(
    settings: Settings, host: str
) -> AsyncIterator[tuple[Services, Path | None, str]]:
    with _alone(settings.data):
        here = Host.from_settings(settings)
        runtime = await here.backend.check()
        image = here.image("base")
        blobs = await Blobs.open_at(settings.blob_address)
        metrics = Metrics(version=__version__, rung=here.backend.rung)
        database = await Database.open(settings.database_address, metrics)
        pool = Pool(here.backend, SandboxSpec(), image, size=settings.pool_size, meters=metrics)
        try:
            queue = Queue(database, settings.quota, meters=metrics)
            record, access = Record(database), Access(database)
            standings = Standings(database, settings.quota)
            uploads = Uploads(database, settings.quota)
            name, machines = _name(settings.data), Machines(here, pool, metrics)
            sandboxes = Sandboxes(standings, queue, machines, home=name)
            rules = Rules(settings.allow_addresses)
            bundle = await outfit.read_bundle(settings.ca_bundle)
            networks = Networks(Dialler(rules), presets=settings.network_presets, bundle=bundle)
            worker = Worker(
                queue,
                record,
                machines,
                sandboxes,
                name=name,
                slots=settings.slots,
                per_tenant=settings.jobs_per_tenant,
                ceilings=Ceilings(silent_s=settings.max_silent_s, cpu_s=settings.max_cpu_s),
                blobs=blobs,
                networks=networks,
            )
            outbox = Outbox(database)
            webhook_secret = await _webhook_secret(outbox, settings)
            sender = Sender(outbox, Outbound(rules), name=worker.name, secret=webhook_secret)
            await queue.reclaim(worker.name)
            standing = {standing.id for standing in await standings.standing(name)}
            await here.backend.sweep(keep=sorted(await queue.machines() | standing))
            pool.start()
            metrics.watch_machines("ready", lambda: pool.ready)
            metrics.watch_machines("job", lambda: worker.busy)
            metrics.watch_machines("sandbox", lambda: sandboxes.standing)
            census = Census(queue)
            services = Services(
                queue=queue,
                record=record,
                access=access,
                quotas=Quotas(database, settings.quota),
                sessions=Sessions(database),
                sandboxes=sandboxes,
                standings=standings,
                outbox=outbox,
                blobs=blobs,
                uploads=uploads,
                max_upload_bytes=settings.max_upload_mib << 20,
                wake=worker.wake,
                rung=here.backend.rung,
                vitals=Vitals(
                    census=census,
                    meters=metrics,
                    scrape=lambda: metrics.scrape(census.counts),
                    pool_ready=lambda: pool.ready,
                    worker_looked_at=lambda: worker.looked_at,
                ),
                api_key=settings.api_key,
                authenticate=settings.auth == "on",
                webhook_secret=webhook_secret,
                addresses=rules,
                presets=frozenset(settings.network_presets),
                max_wall_s=settings.max_wall_s,
                hosts=settings.hosts | ({host} - _ANY_ADDRESS),
            )
            upkeep = retention(settings, queue, uploads, blobs)
            working = [
                asyncio.create_task(worker.run(), name="worker"),
                asyncio.create_task(sandboxes.run(), name="sandboxes"),
                asyncio.create_task(sender.run(), name="webhooks"),
                asyncio.create_task(upkeep.run(), name="retention"),
            ]
            try:
                yield services, await _first_key(access, settings), runtime
            finally:
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
        finally:
            await pool.close()
            await database.close()
            here.backend.close()


@contextlib.contextmanager
def _alone(data: Path) -> Iterator[None]:
    """Hold the data folder: two servers on one would sweep each other's machines."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        lock = os.open(data / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OperatorError(
            f"The data folder {data} cannot be written: {error.strerror}.",
            remedy="Make it writable, or choose another with --data or CLOCHE_DATA.",
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OperatorError(
            f"Another server uses the data folder {data}.",
            remedy="Stop it first, or give this one a folder of its own with --data.",
        ) from None
    else:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OperatorError(
                f"Cannot listen on {host} port {port}: {error.strerror}.",
                remedy="Stop what listens there, or choose another port with --port.",
            ) from error
        listener.listen(1024)
        yield listener
    finally:
        listener.close()


def _reached_at(host: str) -> str:
    """Return the name by which a browser on this host finds us: we go by no wildcard."""
    if host in _ANY_ADDRESS:
        return "[::1]" if ":" in host else "127.0.0.1"
    return f"[{host}]" if ":" in host else host


async def _link(services: Services, key_file: Path | None, url: str) -> str | None:
    """Make a link for whoever started the server."""
    caller = None
    if services.api_key:
        caller = environment(services.api_key)
    elif key_file is not None:
        secret = await asyncio.to_thread(key_file.read_text)
        caller = await services.access.identify(secret.strip())
    if caller is None or not services.authenticate:
        return None
    made = await services.sessions.link(
        key_id=caller.key_id, tenant=caller.tenant, role=caller.role
    )
    return f"{url}/login?token={made.token}"


def _name(data: Path) -> str:
    """Name the worker by its host and data folder, so that a restart knows its own jobs."""
    place = hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:12]
    return f"{platform.node()[:40]}-{place}"


async def _first_key(access: Access, settings: Settings) -> Path | None:
    """Make a first admin key, where only this user can read it; the command line finds it."""
    path = settings.key_file
    if settings.auth == "off" or settings.api_key:
        return None
    if not await access.keys():
        _, secret = await access.create_key(tenant="default", role=Role.ADMIN, name="first")
        await asyncio.to_thread(_write_private, path, secret + "\n")
    return path if path.exists() else None


async def _webhook_secret(outbox: Outbox, settings: Settings) -> str:
    """Return what webhooks are signed with: as set, or as every server on this database has it."""
    if settings.webhook_secret is None:
        return await outbox.secret(new_secret())
    try:
        key_of(settings.webhook_secret)
    except ValueError as error:
        raise BadSettings(
            f"CLOCHE_WEBHOOK_SECRET {error}.",
            remedy='Make one with `echo "whsec_$(openssl rand -base64 32)"`, or unset it.',
        ) from None
    return settings.webhook_secret


def _write_private(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.touch(mode=0o600)
    draft.write_text(text)
    draft.rename(path)
