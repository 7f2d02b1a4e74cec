"""Process 1: forks a keeper for each command and reaps what dies.

It stays single-threaded and small so that forking it is cheap and safe; the
server, with its event loop and threads, is a child. When the server dies the
machine has no reason to live, and process 1 takes it down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from cloche.guest import keeper, linux

SPAWN_FDS = 4
"""What a spawn request carries: the keeper's control socket, stdin, stdout, stderr."""


def run(channel: socket.socket) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.umask(0o022)
    linux.hide_from_ptrace()
    server = os.fork()
    if server == 0:
        ours.close()
        _serve(channel, theirs)
    channel.close()
    theirs.close()
    _silence()
    # A terminal's or a caller's stray signal must not end the machine.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap(server))
    _reap(server)  # One that died before the handler was there.
    while True:
        message, descriptors, _, _ = socket.recv_fds(ours, 1, SPAWN_FDS)
        if not message:
            os._exit(1)
        _fork_keeper(ours, descriptors)


def _serve(channel: socket.socket, spawner: socket.socket) -> None:
    # asyncio loads TLS when it can. The guest never speaks it, and without it
    # starts sooner and smaller.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    from cloche.guest import server  # noqa: PLC0415 - keeps asyncio out of process 1

    linux.die_with_parent()
    server.run(channel, spawner, when_ready=_silence)
    os._exit(0)


def _silence() -> None:
    """Let go of the backend's log: it is for a failed start, and not bounded."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _reap(server: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == server:
                os._exit(1)


def _fork_keeper(ours: socket.socket, descriptors: list[int]) -> None:
    if len(descriptors) == SPAWN_FDS:
        try:
            if os.fork() == 0:
                ours.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                keeper.run(socket.socket(fileno=descriptors[0]), descriptors[1:])
        except OSError as error:
            keeper.report_failure(descriptors[0], error)
    for descriptor in descriptors:
        os.close(descriptor)
