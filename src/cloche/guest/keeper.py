"""Parent of one command and of all that it starts.

A keeper is a child subreaper: a descendant that daemonises, changes session or
loses its parent becomes the keeper's own child, so "kill the whole tree" has an
exact end, the moment the kernel says there is no child left. It needs no cgroup
and so works alike on every backend.

The control socket carries one JSON object a line. The server sends the request
and then `{"kill": true}` or `{"signal": n}`; the keeper sends `{"started": pid}`
or `{"failed": …}`, then `{"exit": …}` when the command itself ends, and closes
the socket when no process of the tree is left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import termios
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from cloche.guest import linux

UID = GID = 1000

_OOM_SCORE = "500"
"""User code goes first when the machine's memory is full, the guest last."""

_STOP_PASSES = 32


def run(control: socket.socket, descriptors: list[int]) -> NoReturn:
    try:
        _keep(control, descriptors)
    finally:
        os._exit(0)


def report_failure(descriptor: int, error: OSError) -> None:
    """Tell the server that not even a keeper could be made."""
    with socket.socket(fileno=os.dup(descriptor)) as control:
        _send(control, {"failed": {"errno": error.errno, "stage": "fork"}})


def _keep(control: socket.socket, descriptors: list[int]) -> None:
    linux.become_subreaper()
    inbox = bytearray()
    while b"\n" not in inbox:
        inbox += control.recv(65536) or b"\n"
    request = json.loads(_take_line(inbox))
    wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    began = time.monotonic()
    try:
        pid = _start(request, descriptors)
    except OSError as error:
        _send(control, {"failed": {"errno": error.errno, "stage": error.filename or "fork"}})
        return
    for descriptor in descriptors:
        os.close(descriptor)
    _send(control, {"started": pid})

    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    ended: dict[str, Any] | None = None
    while True:
        for dead, status, usage in _reap():
            if dead == pid:
                ended = _describe(status, usage, time.monotonic() - began)
                _send(control, {"exit": ended})
        if ended is not None and not _has_children():
            return
        for descriptor, _ in poll.poll():
            if descriptor == wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 512)
            else:
                # Nothing to read means the server is gone: so is the machine, in a moment.
                inbox += control.recv(4096) or b'{"kill": true}\n'
        while b"\n" in inbox:
            order = json.loads(_take_line(inbox))
            if "signal" in order:
                _signal_group(pid, order["signal"])
            else:
                _kill_tree(control, pid, ended, began)
                return


def _take_line(inbox: bytearray) -> bytes:
    line, _, rest = bytes(inbox).partition(b"\n")
    inbox[:] = rest
    return line


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(json.dumps(message).encode() + b"\n")


def _start(request: dict[str, Any], descriptors: list[int]) -> int:
    """Fork the command; raise OSError, with the failing stage as its file name."""
    trouble, trouble_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        stage = "setup"
        try:
            _become_user(request, descriptors)
            stage = "cwd"
            os.chdir(request["cwd"])
            stage = "exec"
            os.execvpe(request["argv"][0], request["argv"], request["env"])  # noqa: S606
        except OSError as error:
            os.write(trouble_end, json.dumps([error.errno, stage]).encode())
        finally:
            os._exit(127)
    os.close(trouble_end)
    with os.fdopen(trouble, "rb") as pipe:
        said = pipe.read()
    if said:
        os.waitpid(pid, 0)
        number, stage = json.loads(said)
        raise OSError(number, os.strerror(number), stage)
    return pid


def _become_user(request: dict[str, Any], descriptors: list[int]) -> None:
    signal.set_wakeup_fd(-1)
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    if request["pty"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    with open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123 - pathlib is not loaded
        score.write(_OOM_SCORE)
    for name, value in request["rlimits"].items():
        _, hard = resource.getrlimit(number := getattr(resource, f"RLIMIT_{name}"))
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (bound, bound))
    linux.drop_capability_bounds()
    os.setgroups([])
    os.setresgid(GID, GID, GID)
    os.setresuid(UID, UID, UID)
    # Python ignores these; a program expects the kernel's default.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _reap() -> list[tuple[int, int, resource.struct_rusage]]:
    dead = []
    with contextlib.suppress(ChildProcessError):
        while (entry := os.wait4(-1, os.WNOHANG))[0]:
            dead.append(entry)
    return dead


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _describe(status: int, usage: resource.struct_rusage, duration_s: float) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    return {
        "code": code if code >= 0 else 128 - code,
        "signal": -code if code < 0 else None,
        "duration_s": round(duration_s, 6),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 6),
        "max_rss_kib": usage.ru_maxrss,
    }


def _signal_group(pid: int, number: int) -> None:
    """Signal the command's process group, as a terminal would; else the command alone."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_tree(
    control: socket.socket, pid: int, ended: dict[str, Any] | None, began: float
) -> None:
    """Kill until the kernel says that no child is left.

    Stopping before killing keeps a fork bomb from growing faster than it is
    listed: a stopped process cannot fork.
    """
    while _has_children():
        stopped: set[int] = set()
        for _ in range(_STOP_PASSES):
            fresh = [member for member in _descendants() if member not in stopped]
            if not fresh:
                break
            _signal_all(fresh, signal.SIGSTOP)
            stopped.update(fresh)
        _signal_all(stopped, signal.SIGKILL)
        time.sleep(0.001)
        for dead, status, usage in _reap():
            if dead == pid and ended is None:
                ended = _describe(status, usage, time.monotonic() - began)
                _send(control, {"exit": ended})


def _signal_all(members: Iterable[int], number: signal.Signals) -> None:
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, number)


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is not loaded
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
                    # The name in parentheses may hold anything: count from the last one.
                    parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESRCH):
                    raise
    tree: list[int] = []
    known = {os.getpid()}
    grown = True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in known and pid not in known:
                known.add(pid)
                tree.append(pid)
                grown = True
    return tree
