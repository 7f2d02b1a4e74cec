"""The server: the API, and a worker in the same process unless it is to have no machines."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import platform
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from cloche import __version__, work
from cloche.api.auth import LOOPBACK, environment
from cloche.api.server import create_app
from cloche.api.services import Services
from cloche.api.vitals import Vitals
from cloche.core.access import Role
from cloche.core.addresses import Rules
from cloche.core.errors import BadSettings, OperatorError
from cloche.jobs.census import Census
from cloche.jobs.machines import NoMachines
from cloche.jobs.outbound import Outbound
from cloche.jobs.sandboxes import Sandboxes
from cloche.jobs.webhooks import Sender, key_of, new_secret
from cloche.observe import traces
from cloche.observe.metrics import Metrics
from cloche.settings import Settings
from cloche.stores.access import Access
from cloche.stores.outbox import Outbox
from cloche.stores.quotas import Quotas
from cloche.stores.record import Record
from cloche.stores.sessions import Sessions
from cloche.stores.uploads import Uploads
from cloche.upkeep import retention

DRAIN_S = 2
"""How long a request that is under way has, once we are told to stop."""
_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - recognised, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that is up."""

    url: str
    key_file: Path | None
    rung: str | None
    """None when it has no machines."""
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
    with listening(host, port) as listener:
        async with (
            traces.exported(os.environ),
            _services(settings, host) as (services, key_file, runtime),
        ):
            config = uvicorn.Config(
                create_app(services),
                log_config=None,
                access_log=False,
                lifespan="off",
                # Whoever follows a job would hold us up until its end.
                timeout_graceful_shutdown=DRAIN_S,
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


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to whoever runs us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _services(
    settings: Settings, host: str
) -> AsyncIterator[tuple[Services, Path | None, str]]:
    async with contextlib.AsyncExitStack() as stack:
        here = await _place(stack, settings)
        metrics = Metrics(version=__version__, rung=here.rung if here else "none")
        shared = await stack.enter_async_context(work.stores(settings, metrics))
        database, queue = shared.database, shared.queue
        access, outbox, rules = Access(database), Outbox(database), Rules(settings.allow_addresses)
        uploads = Uploads(database, settings.quota)
        webhook_secret = await _webhook_secret(outbox, settings)
        crew = None
        if here is not None:
            entering = work.at_work(settings, here, shared, metrics)
            crew = await stack.enter_async_context(entering)
        name = here.name if here else _name_of_door()
        services = Services(
            queue=queue,
            record=Record(database),
            access=access,
            quotas=Quotas(database, settings.quota),
            sessions=Sessions(database),
            sandboxes=crew.sandboxes
            if crew
            else Sandboxes(shared.standings, queue, NoMachines(), home=name),
            standings=shared.standings,
            outbox=outbox,
            blobs=shared.blobs,
            uploads=uploads,
            max_upload_bytes=settings.max_upload_mib << 20,
            wake=crew.worker.wake if crew else _nobody_to_wake,
            rung=here.rung if here else None,
            vitals=_vitals(metrics, Census(queue), crew),
            api_key=settings.api_key,
            authenticate=settings.auth == "on",
            webhook_secret=webhook_secret,
            addresses=rules,
            presets=frozenset(settings.network_presets),
            max_wall_s=settings.max_wall_s,
            hosts=settings.hosts | ({host} - _ANY_ADDRESS),
        )
        sender = Sender(outbox, Outbound(rules), name=name, secret=webhook_secret)
        upkeep = retention(settings, queue, uploads, shared.blobs)
        tasks = (
            asyncio.create_task(sender.run(), name="webhooks"),
            asyncio.create_task(upkeep.run(), name="retention"),
        )
        async with work.until_done(tasks):
            yield services, await _first_key(access, settings), here.runtime if here else ""


async def _place(stack: contextlib.AsyncExitStack, settings: Settings) -> work.Place | None:
    """Make sure of machines, unless this server is to have none."""
    if settings.slots:
        return await stack.enter_async_context(work.place(settings))
    work.make_folder(settings.data)
    return None


def _vitals(metrics: Metrics, census: Census, crew: work.Crew | None) -> Vitals:
    scrape = functools.partial(metrics.scrape, census.counts)
    if crew is None:
        return Vitals(census=census, meters=metrics, scrape=scrape)
    worker, pool, sandboxes = crew.worker, crew.pool, crew.sandboxes
    metrics.watch_machines("ready", lambda: pool.ready)
    metrics.watch_machines("job", lambda: worker.busy)
    metrics.watch_machines("sandbox", lambda: sandboxes.standing)
    return Vitals(
        census=census,
        meters=metrics,
        scrape=scrape,
        pool_ready=lambda: pool.ready,
        worker_looked_at=lambda: worker.looked_at,
    )


def _nobody_to_wake() -> None:
    """Leave it to the workers: they look at the queue by themselves."""


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


def _name_of_door() -> str:
    """Name a server without machines. Many may share a host and a folder: each is another."""
    return f"{platform.node()[:40]}-api-{secrets.token_hex(4)}"


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
