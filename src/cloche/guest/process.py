"""One command, from its start until its record is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from typing import Any

from cloche.guest import paths
from cloche.guest.http import Refusal
from cloche.guest.spool import Spool

READ_BYTES = 64 * 1024
KILL_S = 10.0
SPOOL_FOLDER = "/run/cloche"
END_OF_TRANSMISSION = b"\x04"
"""What closes a terminal's input: Ctrl-D."""

_KILL_TREE = 0
_STAGES = {
    "c": "cannot enter the working folder",
    "e": "cannot run the program",
    "s": "cannot prepare the process",
    "f": "cannot make a process",
}
FULL = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)


class InputClosed(Refusal):
    """The process cannot be sent what it should be."""

    def __init__(self, message: str) -> None:
        super().__init__(409, "stdin_closed", message)


class Process:
    """What the server knows of a command and of its keeper."""

    def __init__(self, request: dict[str, Any], keep: int) -> None:
        self.id: str = request["id"]
        self.argv: list[str] = request["argv"]
        self.cwd: str = request["cwd"]
        self.pty: bool = request["pty"]
        self.started_at = time.time()
        self.pid = 0
        self.exit: dict[str, Any] | None = None
        self.timed_out = False
        self.tree_gone = asyncio.Event()
        self.spools = {name: Spool(SPOOL_FOLDER, keep) for name in ("stdout", "stderr")}
        self.cursors: dict[asyncio.Event, dict[str, int]] = {}
        """One entry for each follower: what wakes it, and how far it has read."""
        self.sources: dict[str, int] = {}
        """The read ends still open. A terminal has one, and it is the write end too."""
        self.stdin: int | None = None
        self.script: str | None = None
        self._waiting: set[str] = set()
        self._keeper: socket.socket | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._feeding = asyncio.Lock()
        self._writable: asyncio.Future[None] | None = None
        """What wakes a writer that waits for the process to read."""
        self._last_fed = b""

    @property
    def begun(self) -> bool:
        """Whether the program runs, or has run: until then, it may still prove impossible."""
        return self.pid > 0

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

    def order(self, byte: int) -> None:
        """Tell the keeper to send a signal, or with 0 to kill the whole tree."""
        if self._keeper is not None and not self.tree_gone.is_set():
            # Not by asyncio's transport: it would answer the EPIPE of a keeper that has just
            # ended by throwing away what the keeper had said last.
            with contextlib.suppress(OSError):
                self._keeper.send(bytes([byte]))

    async def kill(self) -> None:
        """Kill the whole tree and return when the kernel says that none of it is left."""
        self.order(_KILL_TREE)
        try:
            await asyncio.wait_for(self.tree_gone.wait(), KILL_S)
        except TimeoutError:
            raise Refusal(500, "kill_failed", "a process of the tree does not die") from None

    async def begin(self, control: socket.socket, timeout_s: float | None) -> None:
        """Wait until the keeper says that the program runs, or why it cannot."""
        reader, writer = await asyncio.open_unix_connection(sock=control)
        self._keeper = control
        word, *rest = (await reader.readline()).split() or [b"failed", b"0", b"f"]
        if word == b"failed":
            writer.close()
            self.tree_gone.set()
            raise self.refusal(int(rest[0]), rest[1].decode())
        self.pid = int(rest[0])
        loop = asyncio.get_running_loop()
        for name, descriptor in self.sources.items():
            loop.add_reader(descriptor, self._read, name)
        if timeout_s is not None:
            self._deadline = loop.call_later(timeout_s, self._time_out)
        self._watcher = loop.create_task(self._watch(reader, writer))

    def refusal(self, number: int, stage: str) -> Refusal:
        reason = os.strerror(number)
        subject = {"c": f" {self.cwd!r}", "e": f" {self.argv[0]!r}"}.get(stage, "")
        message = f"{_STAGES[stage]}{subject}: {reason}"
        if stage in "fs" or number in FULL:
            return Refusal(507, "machine_full", message)
        return Refusal(422, "not_started", message)

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Follow the keeper until the last process of the tree is gone."""
        while line := await _line(reader):
            _, code, number, duration_s, cpu_s, max_rss_kib = line.split()
            self._drain()
            self._end(int(code), int(number), float(duration_s), float(cpu_s), int(max_rss_kib))
        self.tree_gone.set()
        if self._deadline is not None:
            self._deadline.cancel()
        writer.close()
        if self.exit is None:  # The keeper itself was killed; no one knows more.
            self._end(137, 9, time.time() - self.started_at, 0.0, 0)
        self.notify()

    def _end(
        self, code: int, number: int, duration_s: float, cpu_s: float, max_rss_kib: int
    ) -> None:
        self.exit = {
            "code": code,
            "signal": number or None,
            "timed_out": self.timed_out,
            "duration_s": duration_s,
            "cpu_s": cpu_s,
            "max_rss_kib": max_rss_kib,
        }
        self.remove_script()
        self.notify()

    def _time_out(self) -> None:
        # What a command in time has left behind may go on.
        if self.exit is None:
            self.timed_out = True
            self.order(_KILL_TREE)

    def remove_script(self) -> None:
        if self.script is not None:
            paths.in_background(paths.remove_quietly, self.script)
            self.script = None

    def held(self) -> int:
        """Return how many bytes of output are kept."""
        return sum(spool.end - spool.start for spool in self.spools.values())

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
        """Tell whether a follower is so far behind that the process must wait for it."""
        spool = self.spools[name]
        lag = spool.capacity // 2
        return any(spool.end - cursor[name] > lag for cursor in self.cursors.values())

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
            self._stop_writer()
        os.close(descriptor)

    async def feed(self, data: bytes) -> None:
        """Write all of `data` to the process's input, at the pace it is read."""
        async with self._feeding:
            view = memoryview(data)
            while view:
                if self.stdin is None:
                    raise InputClosed("the process's input is closed")
                try:
                    written = os.write(self.stdin, view)
                    self._last_fed = bytes(view[written - 1 : written])
                    view = view[written:]
                except BlockingIOError:
                    await self._until_writable(self.stdin)
                except OSError as error:
                    if error.errno not in (errno.EPIPE, errno.EIO):
                        raise
                    raise InputClosed("the process no longer reads its input") from None

    async def _until_writable(self, descriptor: int) -> None:
        # A pipe whose readers are gone counts as writable, and then answers EPIPE.
        loop = asyncio.get_running_loop()
        self._writable = loop.create_future()
        loop.add_writer(descriptor, _done, self._writable)
        try:
            await self._writable
        finally:
            self._writable = None
            if self.stdin == descriptor:
                loop.remove_writer(descriptor)

    async def feed_end(self) -> None:
        """Close the input. A terminal's stays open, and is told of the end by Ctrl-D."""
        if self.pty:
            # In the middle of a line the first one only sends what there is of it.
            at_start = self._last_fed in (b"", b"\n", b"\r", b"\x03", END_OF_TRANSMISSION)
            await self.feed(END_OF_TRANSMISSION * (1 if at_start else 2))
        else:
            self.close_stdin()

    def close_stdin(self) -> None:
        if self.stdin is not None:
            descriptor = self.stdin
            self._stop_writer()
            os.close(descriptor)

    def _stop_writer(self) -> None:
        """Give the input up. Before it is closed: its number may be another's the next moment."""
        if self.stdin is not None:
            asyncio.get_running_loop().remove_writer(self.stdin)
            self.stdin = None
        if self._writable is not None:
            _done(self._writable)

    def forget(self) -> None:
        for name in list(self.sources):
            self.close_source(name)
        self.close_stdin()
        for spool in self.spools.values():
            spool.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Read what the keeper says; one that ended with an order unread is at its end, too."""
    try:
        return await reader.readline()
    except ConnectionResetError:
        return b""


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
