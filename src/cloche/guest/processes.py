"""The process table: start, follow, feed, signal, kill."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from cloche.guest import paths
from cloche.guest.http import HEARTBEAT_S, Exchange, Refusal, bad_request, number
from cloche.guest.process import FULL, READ_BYTES, SPOOL_FOLDER, InputClosed, Process

REMEMBERED = 64
"""Finished processes whose output can still be read, if it is not too much in all."""
KEEP_BYTES = 64 * 1024 * 1024
"""What is kept of each stream, and of all finished processes; less on a small disk."""
TOOL_S = 3600
OPEN_FILES = 65536

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

KEEPER = "/opt/cloche/bin/keeper"
_CONTROL_FD = 3
_HEX = frozenset("0123456789abcdef")


class ToolFailed(Refusal):
    """A program that a file call leans on ended badly."""

    def __init__(self, exit_code: int, said: bytes) -> None:
        message = said.decode(errors="replace").strip() or f"exit code {exit_code}"
        full = os.strerror(errno.ENOSPC).encode() in said
        super().__init__(507 if full else 422, "machine_full" if full else "tool_failed", message)
        self.exit_code = exit_code
        self.said = said


class Table:
    """Every process started through the channel."""

    def __init__(self, process_bound: int) -> None:
        self._processes: dict[str, Process] = {}
        # A few slots are kept from user code, so that a fork bomb cannot keep
        # the guest from starting the command that ends it.
        self._user_processes = max(16, process_bound - 24)
        disk = os.statvfs(SPOOL_FOLDER)
        self._keep = min(KEEP_BYTES, max(KEEP_BYTES // 64, disk.f_blocks * disk.f_frsize // 16))

    def get(self, process_id: str) -> Process:
        process = self._processes.get(process_id)
        if process is None or not process.begun:
            raise Refusal(404, "no_such_process", f"no process {process_id!r}")
        return process

    async def listing(self, exchange: Exchange) -> None:
        begun = [process for process in self._processes.values() if process.begun]
        await exchange.answer({"processes": [process.status() for process in begun]})

    async def status(self, exchange: Exchange, process_id: str) -> None:
        await exchange.answer(self.get(process_id).status())

    async def start(self, exchange: Exchange) -> None:
        """Start a command and, when asked, follow its output on the same connection."""
        process = await self._spawn(await exchange.json())
        if exchange.query.get("follow") != "1":
            await exchange.answer(process.status())
            return
        await exchange.begin_lines({"started": process.status()})
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
            await process.feed_end()
        await exchange.answer({})

    async def signal(self, exchange: Exchange, process_id: str) -> None:
        process = self.get(process_id)
        process.order(number(exchange, "number", 15, 1, 64))
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
    ) -> AsyncGenerator[bytes, None]:
        """Run a program of the image as the user, for a file call, and yield its output."""
        process = await self._spawn(
            {"argv": argv, "cwd": cwd, "timeout_s": TOOL_S, "stdin": stdin is not None}
        )
        cursor = {"stdout": 0, "stderr": 0}
        process.cursors[wake := asyncio.Event()] = cursor
        spool = process.spools["stdout"]
        try:
            if stdin is not None:
                with contextlib.suppress(InputClosed):  # Why it stopped reading, its end tells.
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
        if request["id"] in self._processes:
            raise Refusal(409, "process_exists", f"process {request['id']!r} was started before")
        process = Process(request, self._keep)
        # From here on, so that a second start with the same id is refused, not raced.
        self._processes[process.id] = process
        try:
            if "script" in body:
                script = await paths.write_script(process.cwd, process.id, body["script"])
                process.script = script
                process.argv = [*process.argv, script]
            control = await self._fork(process, request["env"], body)
            await process.begin(control, timeout_s)
        except BaseException:
            del self._processes[process.id]
            process.forget()
            process.remove_script()
            raise
        self._forget_old()
        return process

    async def _fork(
        self, process: Process, env: dict[str, str], body: dict[str, Any]
    ) -> socket.socket:
        """Start the process's keeper; return our end of its control socket."""
        given = await self._wire(process, body)
        ours, theirs = socket.socketpair()
        try:
            os.posix_spawn(  # noqa: ASYNC221 - returns as soon as the keeper runs
                KEEPER,
                [
                    KEEPER, process.cwd, str(self._user_processes), str(OPEN_FILES),
                    str(int(process.pty)), *process.argv,
                ],
                env,
                # Ours start at 4: 0 to 2 are /dev/null, 3 is the channel.
                file_actions=[
                    *((os.POSIX_SPAWN_DUP2, end, target) for target, end in enumerate(given)),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), _CONTROL_FD),
                ],
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise process.refusal(error.errno or 0, "f" if error.errno in FULL else "e") from None
        finally:
            theirs.close()
            for end in set(given):
                os.close(end)
        ours.setblocking(False)
        return ours

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
        """Forget the oldest that ended, but never the latest."""
        finished = [
            process
            for process in self._processes.values()
            if process.tree_gone.is_set() and not process.cursors
        ]
        held = sum(process.held() for process in finished)
        for count, process in enumerate(finished[:-1]):
            if len(finished) - count <= REMEMBERED and held <= self._keep:
                return
            held -= process.held()
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
                                "data": binascii.b2a_base64(data, newline=False).decode(),
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
    process_id = body.get("id", os.urandom(8).hex())
    if not isinstance(process_id, str) or not _is_id(process_id):
        raise bad_request("id is 16 hexadecimal digits")
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
        {
            "id": process_id,
            "argv": argv,
            "env": {**base, **env},
            "cwd": cwd,
            "pty": terminal is not None,
        },
        timeout_s,
    )


def _is_id(text: str) -> bool:
    return len(text) == 16 and _HEX.issuperset(text)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _set_size(terminal: int, rows: int, cols: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
