"""The one host-side class over any Machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from cloche.core.errors import (
    BadRequest,
    ClocheError,
    CommandTimeout,
    GuestMisbehaved,
    InputClosed,
    MachineNotStarted,
    NoSuchProcess,
    OutputTooLarge,
    SandboxLost,
    UnknownLanguage,
)
from cloche.core.image import Image
from cloche.core.machine import Backend, ByteStream, Machine, Usage
from cloche.core.process import Chunk, ExecResult, Exit, ProcessStatus
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.sandbox import wire
from cloche.sandbox.client import Client, half_a_character
from cloche.sandbox.files import Files
from cloche.sandbox.process import Follower, Process

TIMEOUT_S: Final = 60.0
MAX_OUTPUT_BYTES: Final = 16 * 1024 * 1024
_START_S: Final = 60.0
_GRACE_S: Final = 15.0
"""How much later than its own deadline the guest may report a killed command."""
_BEGIN_S: Final = 5.0
"""How long a caller who leaves waits to learn whether the command has begun."""
_REQUEST_BYTES: Final = 4 * 1024 * 1024


def new_process_id() -> str:
    """Make up an id for a process that is yet to be started."""
    return secrets.token_hex(8)


LANGUAGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "python": (".py", ("python3",)),
    "typescript": (".ts", ("bun", "run")),
    "javascript": (".js", ("node",)),
    "bash": (".sh", ("bash",)),
}
"""What `run_code` speaks: the suffix of the file, and what runs it."""


class Sandbox:
    """One isolated machine: run commands and code, move files, reach its servers.

    Any call may raise `SandboxLost` (the machine is gone; the fate of what ran in
    it is unknown), `GuestMisbehaved` (what came back cannot be trusted; destroy it)
    and `MachinePaused`.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._client = Client(machine)
        self.files = Files(self._client)

    @classmethod
    async def start_on(
        cls, backend: Backend, spec: SandboxSpec, image: Image, *, durable: bool = False
    ) -> Self:
        """Make a machine and wait until its guest answers.

        Raises:
            BackendUnavailable, MachineNotStarted: as `Backend.create`.
        """
        sandbox = cls(await backend.create(spec, image, durable=durable))
        try:
            await sandbox.hello()
        except BaseException as error:
            said = await sandbox.machine.last_words()
            await asyncio.shield(sandbox.close())
            if isinstance(error, SandboxLost | GuestMisbehaved):
                raise MachineNotStarted(
                    f"The machine started, but its guest did not answer: {wire.clean(said)}",
                    remedy="The image may be damaged: run `cloche image build --force`.",
                ) from error
            raise
        return sandbox

    @property
    def id(self) -> str:
        return self.machine.id

    @property
    def rung(self) -> Rung:
        return self.machine.rung

    @property
    def spec(self) -> SandboxSpec:
        return self.machine.spec

    async def hello(self) -> None:
        """Check that the guest answers and speaks our protocol."""
        await self._client.call(wire.Hello, "GET", "/", timeout_s=_START_S)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        stdin: bytes | None = None,
        timeout_s: float = TIMEOUT_S,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """Run `argv` without a shell and wait for it.

        Raises:
            CommandTimeout: it took longer than `timeout_s`; the whole process tree is dead.
            OutputTooLarge: it wrote more than `max_output_bytes`; the tree is dead.
            CommandNotStarted: there is no such program or folder.
            MachineFull: the machine has no process left to give.
            BadRequest: an argument is malformed.
        """
        body = _request(argv, env, cwd, timeout_s=timeout_s, stdin=stdin is not None)
        return await self._run(body, stdin, timeout_s, max_output_bytes)

    async def run_code(
        self,
        language: str,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        stdin: bytes | None = None,
        timeout_s: float = TIMEOUT_S,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """Run `code` as a program of its own: nothing is kept but the files it leaves.

        Raises:
            UnknownLanguage: it is none of python, typescript, javascript, bash.
            As `exec`, besides.
        """
        body = code_request(language, code, env, cwd, timeout_s=timeout_s, stdin=stdin is not None)
        return await self._run(body, stdin, timeout_s, max_output_bytes)

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        process_id: str | None = None,
    ) -> Process:
        """Start `argv` and return at once. It runs on when the caller dies.

        `pty` is a terminal's rows and columns. `process_id`, from `new_process_id`, lets a
        caller write down what it is about to start, and start it once whatever happens.

        Raises:
            ProcessExists: `process_id` was started before.
            As `exec`, besides.
        """
        body = _request(argv, env, cwd, timeout_s=timeout_s, stdin=stdin, pty=pty)
        return await self._start(body, process_id)

    async def start_code(
        self,
        language: str,
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        stdin: bool = False,
        timeout_s: float | None = None,
        process_id: str | None = None,
    ) -> Process:
        """Start `code` and return at once, as `start` does. Raises as `start` and `run_code`."""
        body = code_request(language, code, env, cwd, timeout_s=timeout_s, stdin=stdin)
        return await self._start(body, process_id)

    async def attach(self, process_id: str) -> Process:
        """Take up a process by its id, whoever started it.

        Raises:
            NoSuchProcess: the machine does not know it, or has forgotten it.
        """
        if not process_id.isascii() or not process_id.isalnum():
            raise BadRequest(
                f"{process_id!r} is no process id.", remedy="List the sandbox's processes."
            )
        line = await self._client.call(wire.StatusLine, "GET", f"/processes/{process_id}")
        if line.id != process_id:
            raise wire.misbehaved("another process than the one asked for")
        return Process(self._client, line.id, line.pid)

    async def processes(self) -> list[ProcessStatus]:
        """List what was started here: what runs, and what ended of late."""
        listing = await self._client.call(wire.ProcessesLine, "GET", "/processes")
        return [line.value() for line in listing.processes]

    async def tunnel(self, *, port: int | None = None, unix: str | None = None) -> ByteStream:
        """Open a byte stream to a server inside: a loopback port, or a unix socket.

        Raises:
            PortClosed: nobody listens there.
            PathRefused: the socket lies outside the user's folders.
        """
        if (port is None) == (unix is None) or (port is not None and not 1 <= port <= 65535):
            raise BadRequest(
                "A tunnel leads to one port from 1 to 65535, or to one unix socket.",
                remedy="Give either port or unix.",
            )
        query = {"port": port, "unix": unix}
        async with self._client.open("GET", "/tunnel", query, prompt=True) as exchange:
            return exchange.hand_over()

    async def accept(
        self,
        *,
        port: int,
        hold: bool = False,
        on_listening: Callable[[], None] | None = None,
    ) -> ByteStream:
        """Wait until a program inside connects to `port` of loopback; return its connection.

        The guest listens there for as long as some such call waits, or its stream is open;
        `on_listening` is called once it does, and now and then. With `hold`, the call keeps
        the port open and takes no connection: it does not return.

        Raises:
            PortTaken: a program listens there itself.
        """
        async with self._client.open(
            "GET", "/egress", {"port": port, "hold": hold}, on_sign=on_listening
        ) as exchange:
            return exchange.hand_over()

    async def usage(self) -> Usage:
        return await self.machine.usage()

    async def pause(self) -> None:
        await self.machine.pause()

    async def resume(self) -> None:
        await self.machine.resume()

    async def close(self) -> None:
        """Destroy the machine and return once nothing of it is left. Idempotent.

        Raises:
            MachineNotDestroyed: something of it is.
        """
        await self.machine.destroy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.shield(self.close())

    async def _start(self, body: dict[str, Any], process_id: str | None) -> Process:
        if process_id is not None:
            body["id"] = process_id
        line = await self._client.call(wire.StatusLine, "POST", "/processes", body=_encode(body))
        if process_id is not None and line.id != process_id:
            raise wire.misbehaved("another process than the one asked for")
        return Process(self._client, line.id, line.pid)

    async def _run(
        self, body: dict[str, Any], stdin: bytes | None, timeout_s: float, limit: int
    ) -> ExecResult:
        if limit < 0:
            raise BadRequest(
                f"max_output_bytes is {limit}; it cannot be below zero.",
                remedy="Allow the output some bytes.",
            )
        run = _Run(self._client, limit)
        # A task of its own, so that a caller who leaves while the command starts leaves
        # someone behind who learns which one it is.
        following = asyncio.create_task(run.follow(body, stdin))
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                exit_ = await asyncio.shield(following)
        except TimeoutError:
            raise self._client.silent() from None
        except OutputTooLarge:
            await asyncio.shield(run.kill())
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(ClocheError):  # Or it would take the cancellation's place.
                await asyncio.shield(run.kill())
            raise
        finally:
            following.cancel()
            following.add_done_callback(_pass_over)
        if exit_.timed_out:
            raise CommandTimeout(
                f"The command did not end within {timeout_s:g} s; it and all it started are dead.",
                remedy="Allow it more time, or start it and follow it instead.",
                stdout=run.collected("stdout"),
                stderr=run.collected("stderr"),
            )
        return ExecResult(
            exit=exit_,
            stdout_bytes=run.collected("stdout"),
            stderr_bytes=run.collected("stderr"),
        )


class _Run:
    """One command run to its end, its output collected up to a bound."""

    def __init__(self, client: Client, limit: int) -> None:
        self._client = client
        self._limit = limit
        self._process: Process | None = None
        self._begun = asyncio.Event()
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}

    def collected(self, stream: str) -> bytes:
        return bytes(self._output[stream])

    async def follow(self, body: dict[str, Any], stdin: bytes | None) -> Exit:
        feeding: asyncio.Task[None] | None = None
        follower = Follower({"stdout": 0, "stderr": 0})
        lines = self._client.lines(
            wire.OutputLine, "POST", "/processes", {"follow": True}, _encode(body)
        )
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    if self._process is None:
                        if line.started is None:
                            raise wire.misbehaved("something before the start")
                        self._process = Process(self._client, line.started.id, line.started.pid)
                        self._begun.set()
                        if stdin is not None:
                            feeding = asyncio.create_task(_feed(self._process, stdin))
                    elif chunk := follower.take(line):
                        self._collect(chunk)
        finally:
            self._begun.set()
            if feeding is not None:
                feeding.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await feeding
        return follower.ended()

    def _collect(self, chunk: Chunk) -> None:
        self._output[chunk.stream] += chunk.data
        if sum(map(len, self._output.values())) > self._limit:
            raise OutputTooLarge(
                f"The command wrote more than {self._limit} bytes; it and all it started are dead.",
                remedy="Allow more, write to a file, or start it and follow it instead.",
                stdout=self.collected("stdout")[: self._limit],
                stderr=self.collected("stderr")[: self._limit],
            )

    async def kill(self) -> None:
        """End what nobody waits for any more; a machine that is gone has ended it already."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_S):
                await self._begun.wait()
        if self._process is not None:
            with contextlib.suppress(SandboxLost, NoSuchProcess):
                await self._process.kill()


def _pass_over(task: asyncio.Task[Exit]) -> None:
    """Take note of an error that nobody waits for any more, or asyncio would log it."""
    if not task.cancelled():
        task.exception()


async def _feed(process: Process, stdin: bytes) -> None:
    # A program that does not read all of its input is no fault of the caller.
    with contextlib.suppress(InputClosed, NoSuchProcess):
        await process.write(stdin, close=True)


def code_request(
    language: str,
    code: str,
    env: Mapping[str, str] | None,
    cwd: str,
    *,
    timeout_s: float | None,
    stdin: bool,
) -> dict[str, Any]:
    if language not in LANGUAGES:
        raise UnknownLanguage(
            f"No machine speaks {wire.clean(repr(language), 80)}.",
            remedy=f"Choose one of {', '.join(LANGUAGES)}.",
        )
    suffix, runner = LANGUAGES[language]
    body = _request(runner, env, cwd, timeout_s=timeout_s, stdin=stdin)
    return {**body, "script": {"suffix": suffix, "code": code}}


def _request(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str,
    *,
    timeout_s: float | None,
    stdin: bool,
    pty: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Check what the caller gave, so that a mistake is told before it travels."""
    if isinstance(argv, str) or not argv or not all(isinstance(part, str) for part in argv):
        raise BadRequest(
            "argv is not a list of strings with the program's name first.",
            remedy='Give a list, such as ["echo", "hello"]; for a shell, ["bash", "-c", "…"].',
        )
    if any("\0" in part for part in [*argv, *(env or {}), *(env or {}).values(), cwd]):
        raise BadRequest(
            "An argument, a variable or the folder holds a NUL byte.",
            remedy="Leave it out: no program can be given one. Send such bytes as stdin.",
        )
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise BadRequest(
            f"timeout_s is {timeout_s}; it must be above zero and finite.",
            remedy="Give the command some seconds.",
        )
    body: dict[str, Any] = {"argv": list(argv), "cwd": cwd, "stdin": stdin}
    if env:
        body["env"] = dict(env)
    if timeout_s is not None:
        body["timeout_s"] = timeout_s
    if pty is not None:
        body["pty"] = {"rows": pty[0], "cols": pty[1]}
    return body


def _encode(body: dict[str, Any]) -> bytes:
    try:
        raw = json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise half_a_character() from None
    if len(raw) > _REQUEST_BYTES:
        raise BadRequest(
            f"The command, its variables and its code take {len(raw)} bytes; "
            f"{_REQUEST_BYTES} is the most.",
            remedy="Write large content to a file in the machine first.",
        )
    return raw
