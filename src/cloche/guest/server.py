"""Answers the host's calls. The table of routes below is the whole API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable

from cloche.guest import files, linux, paths, tunnel, watch
from cloche.guest.egress import Egress
from cloche.guest.http import Exchange, Refusal
from cloche.guest.process import SPOOL_FOLDER
from cloche.guest.processes import Table

PROTOCOL = 1
_BACKLOG = 256
_PROCESS = "/processes/*"
"""Stands for the path of any one process."""

Handler = Callable[..., Awaitable[None]]
Routes = dict[tuple[str, str], Handler]


def run(channel: socket.socket) -> None:
    os.umask(0o022)
    linux.hide_from_ptrace()
    asyncio.run(_serve(channel))


async def _serve(channel: socket.socket) -> None:
    os.makedirs(SPOOL_FOLDER, mode=0o700, exist_ok=True)  # noqa: PTH103 - pathlib is not loaded
    routes = _routes(Table(int(os.environ.get("CLOCHE_PIDS", "1024"))))

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = Exchange(reader, writer)
        try:
            await _handle(routes, exchange)
        finally:
            exchange.stop_heartbeat()
            writer.close()

    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap)
    channel.setblocking(False)
    server = await asyncio.start_unix_server(on_connect, sock=channel, backlog=_BACKLOG)
    _silence()
    await server.serve_forever()


def _reap() -> None:
    """Collect dead keepers, and any orphan that outlived its own."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _silence() -> None:
    """Let go of the backend's log: it is for a failed start, and not bounded."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _routes(table: Table) -> Routes:
    process = _PROCESS
    began = time.monotonic()

    async def hello(exchange: Exchange) -> None:
        await exchange.answer(
            {"protocol": PROTOCOL, "uptime_s": round(time.monotonic() - began, 3)}
        )

    calls: list[tuple[str, str, Handler]] = [
        ("GET", "/", hello),
        ("GET", "/processes", table.listing),
        ("POST", "/processes", table.start),
        ("GET", process, table.status),
        ("GET", f"{process}/output", table.output),
        ("POST", f"{process}/stdin", table.stdin),
        ("POST", f"{process}/signal", table.signal),
        ("POST", f"{process}/kill", table.kill),
        ("POST", f"{process}/resize", table.resize),
        ("GET", "/files", files.read),
        ("PUT", "/files", files.write),
        ("DELETE", "/files", files.remove),
        ("GET", "/files/stat", files.stat),
        ("GET", "/files/list", files.list_folder),
        ("POST", "/files/mkdir", files.mkdir),
        ("POST", "/files/move", files.move),
        ("GET", "/files/glob", files.glob),
        ("GET", "/files/grep", lambda exchange: files.grep(exchange, table)),
        ("GET", "/files/tar", lambda exchange: files.tar_out(exchange, table)),
        ("PUT", "/files/tar", lambda exchange: files.tar_in(exchange, table)),
        ("GET", "/files/watch", watch.watch),
        ("GET", "/tunnel", tunnel.open_tunnel),
        ("GET", "/egress", Egress().accept),
    ]
    return {(method, path): handler for method, path, handler in calls}


async def _handle(routes: Routes, exchange: Exchange) -> None:
    try:
        if await exchange.receive():
            await _dispatch(routes, exchange)
    except Refusal as refusal:
        await _refuse(exchange, refusal)
    except ConnectionError:
        return  # The host left; what it had started goes on.
    except OSError as error:
        await _refuse(exchange, paths.refusal(error))
    except Exception as error:
        # A fault of ours. Told, not lost: the connection's end alone would look like the machine's.
        await _refuse(exchange, Refusal(500, "guest_fault", f"{type(error).__name__}: {error}"))


async def _dispatch(routes: Routes, exchange: Exchange) -> None:
    path, arguments = exchange.path, []
    if path.startswith("/processes/"):
        process_id, slash, call = path.removeprefix("/processes/").partition("/")
        path, arguments = f"{_PROCESS}{slash}{call}", [process_id]
    handler = routes.get((exchange.method, path))
    if handler is None:
        raise Refusal(404, "no_such_call", f"no call {exchange.method} {exchange.path}")
    await handler(exchange, *arguments)


async def _refuse(exchange: Exchange, refusal: Refusal) -> None:
    """Say why not; in the middle of an answer, cut it short, so that it is not taken as whole."""
    if not exchange.answered:
        with contextlib.suppress(ConnectionError):  # The host did not wait for it.
            reason = {"code": refusal.code, "message": refusal.message}
            await exchange.answer(reason, refusal.status)
            await exchange.linger()
