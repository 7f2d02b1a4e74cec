"""The process table: start, follow, feed, signal, kill."""

from __future__ import annotations

import asyncio
import base64
import errno
import fcntl
import json
import os
import secrets
import socket
import struct
import termios
import time
from collections.abc import AsyncIterator
from typing import Any

from cloche.guest import paths
from cloche.guest.http import Exchange, Refusal, bad_request, number
from cloche.guest.spool import KEEP, Spool

READ_BYTES = 64 * 1024
LAG = KEEP // 2
"""How far a follower may fall behind before the process is made to wait for it."""
HEARTBEAT_S = 5.0
REMEMBERED = 64
"""Finished processes whose output can still be read."""
SPOOL_FOLDER = "/run/cloche"
KILL_S = 10.0
TOOL_S = 3600
END_OF_TRANSMISSION = b"\x04"
"""What closes a terminal's input: Ctrl-D."""

BASE_ENV = {
    "HOME": "/home/user",
    "USER": "user",
    "LOGNAME": "user",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "PATH": (
        "/opt/venv/bin:/home/user/.npm-global/bin:/home/user/.local/bin:"
        "/usr/local/bin:/usr/bin:/bin"
    ),
}

_STAGES = {
    "cwd": "cannot enter the working folder",
    "exec": "cannot run the program",
    "setup": "cannot prepare the process",
    "fork": "cannot make a process",
}


class Process:
    """One command, from its start until its record is forgotten."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.id = secrets.token_hex(8)
        self.argv: list[str] = request["argv"]
        self.pty: bool = request["pty"]
        self.started_at = time.time()
        self.pid = 0
        self.exit: dict[str, Any] | None = None
        self.timed_out = False
        self.tree_gone = asyncio.Event()
        self.spools = {"stdout": Spool(SPOOL_FOLDER), "stderr": Spool(SPOOL_FOLDER)}
        self.cursors: dict[asyncio.Event, dict[str, int]] = {}
        """One entry for each follower: what wakes it, and how far it has read."""
        self.sources: dict[str, int] = {}
        """The read ends still open. A terminal has one, and it is the write end too."""
        self.stdin: int | None = None
        self.script: str | None = None
        self._waiting: set[str] = set()
        self._control_writer: asyncio.StreamWriter | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._feeding = asyncio.Lock()

    def status(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "pid": self.pid,
            "argv": self.argv,
            "pty": self.pty,
            "started_at": self.started_at,
            "stdout_bytes": self.spools["stdout"].end,
            "stderr_bytes": self.spools["stderr"].end,
            "exit": self.exit,
        }

    def order(self, message: dict[str, Any]) -> None:
        if self._control_writer is not None and not self.tree_gone.is_set():
            self._control_writer.write(json.dumps(message).encode() + b"\n")

    async def kill(self) -> None:
        """Kill the whole tree and return when the kernel says that none of it is left."""
        self.order({"kill": True})
        try:
            await asyncio.wait_for(self.tree_gone.wait(), KILL_S)
        except TimeoutError:
            raise Refusal(500, "kill_failed", "a process of the tree does not die") from None

    async def begin(
        self, control: socket.socket, request: dict[str, Any], timeout_s: float | None
    ) -> None:
        """Hand the request to the keeper and wait until the program runs, or cannot."""
        reader, writer = await asyncio.open_unix_connection(sock=control, limit=READ_BYTES)
        self._control_writer = writer
        writer.write(json.dumps(request).encode() + b"\n")
        first = json.loads(await reader.readline() or '{"failed": {"errno": 0, "stage": "fork"}}')
        if "failed" in first:
            writer.close()
            self.tree_gone.set()
            raise _start_refusal(request, **first["failed"])
        self.pid = first["started"]
        loop = asyncio.get_running_loop()
        for name, descriptor in self.sources.items():
            loop.add_reader(descriptor, self._read, name)
        if timeout_s is not None:
            self._deadline = loop.call_later(timeout_s, self._time_out)
        self._watcher = loop.create_task(self._watch(reader))

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Follow the keeper until the last process of the tree is gone."""
        while line := await reader.readline():
            self._drain()
            self.exit = {**json.loads(line)["exit"], "timed_out": self.timed_out}
            self.remove_script()
            # A timed-out command has ended when its whole tree has.
            if not self.timed_out:
                self.notify()
        self.tree_gone.set()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._control_writer is not None:
            self._control_writer.close()
        if self.exit is None:  # The keeper itself died; no one knows more.
            self.exit = {
                "code": 137, "signal": 9, "timed_out": self.timed_out,
                "duration_s": time.time() - self.started_at, "cpu_s": 0.0, "max_rss_kib": 0,
            }  # fmt: skip
            self.remove_script()
        self.notify()

    def _time_out(self) -> None:
        self.timed_out = True
        if self.exit is None:
            self.order({"kill": True})

    def remove_script(self) -> None:
        if self.script is not None:
            paths.in_background(paths.remove_quietly, self.script)
            self.script = None

    def notify(self) -> None:
        for wake in self.cursors:
            wake.set()

    def _read(self, name: str) -> None:
        if self._must_wait(name):
            asyncio.get_running_loop().remove_reader(self.sources[name])
            self._waiting.add(name)
        else:
            self._read_once(name)

    def _read_once(self, name: str) -> bool:
        """Move what is there into the spool; return whether there may be more."""
        descriptor = self.sources[name]
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            # Linux answers EIO on a terminal whose last process has gone.
            if error.errno != errno.EIO:
                raise
            data = b""
        if not data:
            self.close_source(name)
            return False
        self.spools[name].append(data)
        self.notify()
        return True

    def _drain(self) -> None:
        """Take in what the ended process had written; later writers keep the pipe open."""
        for name in list(self.sources):
            for _ in range(32):
                if not self._read_once(name):
                    break

    def _must_wait(self, name: str) -> bool:
        end = self.spools[name].end
        return any(end - cursor[name] > LAG for cursor in self.cursors.values())

    def caught_up(self) -> None:
        """A follower read on, or left: let a waiting process write again."""
        for name in list(self._waiting):
            if not self._must_wait(name):
                self._waiting.discard(name)
                asyncio.get_running_loop().add_reader(self.sources[name], self._read, name)

    def close_source(self, name: str) -> None:
        descriptor = self.sources.pop(name)
        self._waiting.discard(name)
        asyncio.get_running_loop().remove_reader(descriptor)
        if descriptor == self.stdin:
            self.stdin = None
        os.close(descriptor)

    async def feed(self, data: bytes) -> None:
        """Write all of `data` to the process's input, at the pace it is read."""
        async with self._feeding:
            view = memoryview(data)
            while view:
                if self.stdin is None:
                    raise Refusal(409, "stdin_closed", "the process's input is closed")
                try:
                    view = view[os.write(self.stdin, view) :]
                except BlockingIOError:
                    await self._until_writable(self.stdin)
                except OSError as error:
                    if error.errno not in (errno.EPIPE, errno.EIO):
                        raise
                    message = "the process no longer reads its input"
                    raise Refusal(409, "stdin_closed", message) from None

    async def _until_writable(self, descriptor: int) -> None:
        # A pipe whose readers are gone counts as writable, and then answers EPIPE.
        loop = asyncio.get_running_loop()
        writable: asyncio.Future[None] = loop.create_future()
        loop.add_writer(descriptor, _done, writable)
        try:
            await writable
        finally:
            loop.remove_writer(descriptor)

    def close_stdin(self) -> None:
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None

    def forget(self) -> None:
        for name in list(self.sources):
            self.close_source(name)
        self.close_stdin()
        for spool in self.spools.values():
            spool.close()


def _start_refusal(request: dict[str, Any], errno: int, stage: str) -> Refusal:
    reason = os.strerror(errno)
    subject = {"cwd": request["cwd"], "exec": request["argv"][0]}.get(stage, "")
    if stage in ("fork", "setup") or errno in _FULL:
        return Refusal(507, "machine_full", f"{_STAGES[stage]}: {reason}")
    return Refusal(422, "not_started", f"{_STAGES[stage]} {subject!r}: {reason}")


_FULL = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)


class ToolFailed(Refusal):
    """A program that a file call leans on ended badly."""

    def __init__(self, exit_code: int, said: bytes) -> None:
        message = said.decode(errors="replace").strip() or f"exit code {exit_code}"
        super().__init__(422, "tool_failed", message)
        self.exit_code = exit_code


class Table:
    """Every process started through the channel."""

    def __init__(self, spawner: socket.socket, process_bound: int) -> None:
        self._spawner = spawner
        self._processes: dict[str, Process] = {}
        # A few slots are kept from user code, so that a fork bomb cannot keep
        # the guest from starting the command that ends it.
        self._rlimits = {"NPROC": max(16, process_bound - 24), "NOFILE": 65536, "CORE": 0}

    def get(self, process_id: str) -> Process:
        try:
            return self._processes[process_id]
        except KeyError:
            raise Refusal(404, "no_such_process", f"no process {process_id!r}") from None

    async def listing(self, exchange: Exchange) -> None:
        await exchange.answer({"processes": [p.status() for p in self._processes.values()]})

    async def status(self, exchange: Exchange, process_id: str) -> None:
        await exchange.answer(self.get(process_id).status())

    async def start(self, exchange: Exchange) -> None:
        """Start a command and, when asked, follow its output on the same connection."""
        process = await self._spawn(await exchange.json())
        if exchange.query.get("follow") != "1":
            await exchange.answer(process.status())
            return
        await exchange.begin_lines()
        await exchange.line({"started": process.status()})
        await self._follow(exchange, process, {"stdout": 0, "stderr": 0})

    async def output(self, exchange: Exchange, process_id: str) -> None:
        """Follow a process from any byte offsets, until it ends."""
        process = self.get(process_id)
        cursor = {
            name: number(exchange, name, 0, 0, spool.end) for name, spool in process.spools.items()
        }
        await exchange.begin_lines()
        await self._follow(exchange, process, cursor)

    async def stdin(self, exchange: Exchange, process_id: str) -> None:
        process = self.get(process_id)
        async for data in exchange.body():
            await process.feed(data)
        if exchange.query.get("close") == "1":
            if process.pty:
                await process.feed(END_OF_TRANSMISSION)
            else:
                process.close_stdin()
        await exchange.answer({})

    async def signal(self, exchange: Exchange, process_id: str) -> None:
        process = self.get(process_id)
        process.order({"signal": number(exchange, "number", 15, 1, 64)})
        await exchange.answer({})

    async def kill(self, exchange: Exchange, process_id: str) -> None:
        process = self.get(process_id)
        await process.kill()
        await exchange.answer(process.status())

    async def resize(self, exchange: Exchange, process_id: str) -> None:
        process = self.get(process_id)
        if not process.pty:
            raise bad_request("this process has no terminal")
        if process.stdin is not None:
            _set_size(
                process.stdin,
                number(exchange, "rows", 24, 1, 4096),
                number(exchange, "cols", 80, 1, 4096),
            )
        await exchange.answer({})

    async def tool(
        self, argv: list[str], cwd: str, stdin: AsyncIterator[bytes] | None = None
    ) -> AsyncIterator[bytes]:
        """Run a program of the image as the user, for a file call, and yield its output."""
        process = await self._spawn(
            {"argv": argv, "cwd": cwd, "timeout_s": TOOL_S, "stdin": stdin is not None}
        )
        cursor = {"stdout": 0, "stderr": 0}
        process.cursors[wake := asyncio.Event()] = cursor
        spool = process.spools["stdout"]
        try:
            if stdin is not None:
                async for data in stdin:
                    await process.feed(data)
                process.close_stdin()
            ended = False
            while not ended:
                wake.clear()
                ended = process.exit is not None
                while cursor["stdout"] < spool.end:
                    data = spool.read(cursor["stdout"], READ_BYTES)
                    cursor["stdout"] += len(data)
                    process.caught_up()
                    yield data
                if not ended:
                    await wake.wait()
            if process.exit is not None and process.exit["code"]:
                raise ToolFailed(process.exit["code"], process.spools["stderr"].read(0, 2000))
        finally:
            del process.cursors[wake]
            await process.kill()
            del self._processes[process.id]
            process.forget()

    async def _spawn(self, body: dict[str, Any]) -> Process:
        request, timeout_s = _parse(body)
        process = Process(request)
        request["rlimits"] = self._rlimits
        if "script" in body:
            process.script = await paths.write_script(request["cwd"], process.id, body["script"])
            request["argv"] = [*request["argv"], process.script]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        given: list[int] = []
        try:
            given = await self._wire(process, body)
            try:
                socket.send_fds(self._spawner, [b"s"], [theirs.fileno(), *given])
            finally:
                theirs.close()
                for descriptor in set(given):
                    os.close(descriptor)
            await process.begin(ours, request, timeout_s)
        except BaseException:
            process.forget()
            process.remove_script()
            raise
        self._processes[process.id] = process
        self._forget_old()
        return process

    async def _wire(self, process: Process, body: dict[str, Any]) -> list[int]:
        """Make the pipes or the terminal; keep our ends, return the process's three."""
        if process.pty:
            size = body["pty"]
            master, slave = await paths.as_user(os.openpty)
            _set_size(master, size["rows"], size["cols"])
            os.set_blocking(master, False)
            process.sources["stdout"] = process.stdin = master
            return [slave, slave, slave]
        if body.get("stdin"):
            child_in, process.stdin = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(process.stdin, False)
        else:
            child_in = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        given = [child_in]
        for name in ("stdout", "stderr"):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read_end, False)
            process.sources[name] = read_end
            given.append(write_end)
        return given

    def _forget_old(self) -> None:
        finished = [
            process
            for process in self._processes.values()
            if process.tree_gone.is_set() and not process.cursors
        ]
        for process in finished[: max(0, len(finished) - REMEMBERED)]:
            del self._processes[process.id]
            process.forget()

    async def _follow(self, exchange: Exchange, process: Process, cursor: dict[str, int]) -> None:
        wake = asyncio.Event()
        process.cursors[wake] = cursor
        try:
            while True:
                wake.clear()
                # Asked before reading: what was written before the end is then sent before it.
                ended = process.exit is not None and (
                    not process.timed_out or process.tree_gone.is_set()
                )
                for name, spool in process.spools.items():
                    while cursor[name] < spool.end:
                        lost = max(0, spool.start - cursor[name])
                        cursor[name] += lost
                        data = spool.read(cursor[name], READ_BYTES)
                        offset, cursor[name] = cursor[name], cursor[name] + len(data)
                        process.caught_up()
                        await exchange.line(
                            {
                                "stream": name,
                                "offset": offset,
                                "lost": lost,
                                "data": base64.b64encode(data).decode("ascii"),
                            }
                        )
                if ended:
                    await exchange.line({"exit": process.exit})
                    await exchange.end()
                    return
                try:
                    await asyncio.wait_for(wake.wait(), HEARTBEAT_S)
                except TimeoutError:
                    await exchange.line({"alive": True})
        finally:
            del process.cursors[wake]
            process.caught_up()


def _parse(body: dict[str, Any]) -> tuple[dict[str, Any], float | None]:
    """Check a start request; return what the keeper needs, and the deadline."""
    argv, env, cwd = body.get("argv"), body.get("env", {}), body.get("cwd", "/workspace")
    timeout_s, terminal = body.get("timeout_s"), body.get("pty")
    if not isinstance(argv, list) or not argv or not all(map(_is_text, argv)) or not argv[0]:
        raise bad_request("argv is a list of strings without NUL, the program's name first")
    if not isinstance(env, dict) or not all(map(_is_text, [*env, *env.values()])):
        raise bad_request("env maps strings to strings, without NUL")
    if any(not name or "=" in name for name in env):
        raise bad_request("a name in env is not empty and holds no `=`")
    if not _is_text(cwd) or not cwd.startswith("/"):
        raise bad_request("cwd is an absolute path")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise bad_request("timeout_s is a number above zero")
    if terminal is not None and not (
        isinstance(terminal, dict)
        and all(type(terminal.get(side)) is int for side in ("rows", "cols"))
        and all(1 <= terminal[side] <= 4096 for side in ("rows", "cols"))
    ):
        raise bad_request("pty holds rows and cols, each from 1 to 4096")
    base = {**BASE_ENV, "TERM": "xterm-256color"} if terminal is not None else BASE_ENV
    return (
        {"argv": argv, "env": {**base, **env}, "cwd": cwd, "pty": terminal is not None},
        timeout_s,
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _set_size(terminal: int, rows: int, cols: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
