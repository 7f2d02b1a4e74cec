"""Commands and code in a sandbox: run, started, followed, fed, ended."""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from signal import SIGTERM
from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field, model_validator

from cloche.api import problems, sse
from cloche.api.answers import sandboxes as answers
from cloche.api.described import answer, both, bytes_body, event_stream, example
from cloche.api.parameters import ProcessId
from cloche.core.errors import BadRequest, ClocheError, InputClosed, NoSuchProcess
from cloche.core.job import Code, Env, Seconds, Text, Value
from cloche.core.process import Chunk, ProcessStatus
from cloche.core.text import whole_length
from cloche.jobs.sandboxes import Opened
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import TIMEOUT_S

OUTPUT_BYTES: Final = 1 << 20
_Offset = Annotated[int, Query(ge=0, le=2**62, examples=[0])]
_RUN: Final = both(answer(answers.ExecResult), event_stream(answers.OUTPUT_STREAM)) | answer(
    answers.Process, 202
)


class _Run(Value):
    """How to run something in a sandbox."""

    env: Env = Field(default_factory=dict)
    cwd: Annotated[Text, Field(min_length=1, max_length=4096)] = "/workspace"
    stdin: Annotated[str, Field(max_length=10_000_000)] | None = None
    """What it reads; without it, and unless it runs in the background, its input is empty."""
    timeout_s: Seconds = TIMEOUT_S
    """It and all it started are killed after this long."""
    background: bool = False
    """Answer at once; follow it, feed it and end it by its id."""
    max_output_bytes: Annotated[int, Field(ge=0, le=16 * OUTPUT_BYTES)] = OUTPUT_BYTES
    """How much of each stream the answer holds; the rest can be read by the process's id."""


class Command(_Run):
    """A program with its arguments, or a line for bash."""

    model_config = example({"command": "echo hello", "env": {"COLOUR": "blue"}, "timeout_s": 60})

    argv: Annotated[list[Text], Field(min_length=1, max_length=10_000)] | None = None
    command: Code | None = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if (self.argv is None) == (self.command is None):
            raise ValueError("give either argv or command")
        return self


class Snippet(_Run):
    """Code, run as a program of its own."""

    model_config = example({"language": "python", "code": "print(6*7)"})

    language: Literal["python", "typescript", "javascript", "bash"]
    code: Code


class Signal(Value):
    """A signal for a process and its group."""

    model_config = example({"number": 15})

    number: Annotated[int, Field(ge=1, le=64)] = int(SIGTERM)


def add_routes(router: APIRouter, prefix: str, *, to_read: Any, to_change: Any) -> None:
    """Add the calls to a router; `to_read` and `to_change` open the sandbox of its path."""

    @router.post(
        f"{prefix}/exec", operation_id="execInSandbox", response_model=None, responses=_RUN
    )
    async def execute(*, request: Request, wanted: Command, opened: Opened = to_change) -> Response:
        """Run a command. Answers when it has ended, or as a stream, or at once (background)."""
        argv = wanted.argv or ["bash", "-c", wanted.command or ""]
        process = await opened.sandbox.start(
            argv,
            env=opened.env | wanted.env,
            cwd=wanted.cwd,
            stdin=wanted.background or wanted.stdin is not None,
            timeout_s=wanted.timeout_s,
        )
        return await _answer(request, process, wanted)

    @router.post(
        f"{prefix}/code", operation_id="runCodeInSandbox", response_model=None, responses=_RUN
    )
    async def run_code(
        *, request: Request, wanted: Snippet, opened: Opened = to_change
    ) -> Response:
        """Run code as a program of its own. Answers as `exec` does."""
        process = await opened.sandbox.start_code(
            wanted.language,
            wanted.code,
            env=opened.env | wanted.env,
            cwd=wanted.cwd,
            stdin=wanted.background or wanted.stdin is not None,
            timeout_s=wanted.timeout_s,
        )
        return await _answer(request, process, wanted)

    @router.get(
        f"{prefix}/processes", operation_id="listProcesses", responses=answer(answers.Processes)
    )
    async def list_processes(*, opened: Opened = to_read) -> dict[str, Any]:
        """List what was started in the sandbox: what runs, and what ended of late."""
        return {"processes": [_view(status) for status in await opened.sandbox.processes()]}

    @router.get(
        f"{prefix}/processes/{{process_id}}",
        operation_id="getProcess",
        responses=answer(answers.Process),
    )
    async def get_process(*, process_id: ProcessId, opened: Opened = to_read) -> dict[str, Any]:
        """Tell how a process is doing."""
        return _view(await (await opened.sandbox.attach(process_id)).status())

    @router.get(
        f"{prefix}/processes/{{process_id}}/output",
        operation_id="followProcess",
        response_class=StreamingResponse,
        responses=event_stream(answers.OUTPUT_STREAM),
    )
    async def output(
        *,
        process_id: ProcessId,
        opened: Opened = to_read,
        stdout: _Offset = 0,
        stderr: _Offset = 0,
        encoding: Annotated[Literal["text", "base64"], Query(examples=["text"])] = "text",
        last_event_id: Annotated[str | None, Header(max_length=64, examples=["6:0"])] = None,
    ) -> Response:
        """Follow a process from any byte of its output to its end, as server-sent events.

        A stream that broke goes on where it was with `Last-Event-ID`.
        """
        process = await opened.sandbox.attach(process_id)
        offsets = _offsets(last_event_id) or (stdout, stderr)
        return sse.response(_stream(process, *offsets, encoding=encoding))

    @router.post(
        f"{prefix}/processes/{{process_id}}/stdin",
        operation_id="feedProcess",
        status_code=204,
        openapi_extra=bytes_body("yes\n"),
    )
    async def feed(
        *,
        request: Request,
        process_id: ProcessId,
        opened: Opened = to_change,
        close: Annotated[
            bool, Query(description="Close the input afterwards.", examples=[True])
        ] = False,
    ) -> None:
        """Send the body to a process's input, at the pace it reads."""
        process = await opened.sandbox.attach(process_id)
        await process.write(request.stream(), close=close)

    @router.post(
        f"{prefix}/processes/{{process_id}}/signal", operation_id="signalProcess", status_code=204
    )
    async def send_signal(
        *, process_id: ProcessId, wanted: Signal, opened: Opened = to_change
    ) -> None:
        """Send a signal to a process and its group."""
        await (await opened.sandbox.attach(process_id)).signal(wanted.number)

    @router.delete(
        f"{prefix}/processes/{{process_id}}", operation_id="killProcess", status_code=204
    )
    async def kill(*, process_id: ProcessId, opened: Opened = to_change) -> None:
        """Kill a process and everything it started; answers once all of it is dead."""
        await (await opened.sandbox.attach(process_id)).kill()


async def _answer(request: Request, process: Process, wanted: _Run) -> Response:
    if wanted.stdin is not None:
        # A program that does not read all of its input is no fault of the caller.
        with contextlib.suppress(InputClosed, NoSuchProcess):
            await process.write(wanted.stdin.encode(), close=not wanted.background)
    if wanted.background:
        return JSONResponse(_view(await process.status()), 202)
    if sse.wanted(request):
        return sse.response(_stream(process, 0, 0, encoding="text"))
    kept = {"stdout": bytearray(), "stderr": bytearray()}
    truncated = False
    async for chunk in process.output():
        room = wanted.max_output_bytes - len(kept[chunk.stream])
        kept[chunk.stream] += chunk.data[:room]
        truncated |= len(chunk.data) > room or bool(chunk.lost)
    ended = await process.wait()
    return JSONResponse(
        {
            "process": process.id,
            "exit_code": ended.code,
            **_without(asdict(ended), "code"),
            "stdout": kept["stdout"].decode(errors="replace"),
            "stderr": kept["stderr"].decode(errors="replace"),
            "truncated": truncated,
        }
    )


async def _stream(
    process: Process, stdout: int, stderr: int, *, encoding: Literal["text", "base64"]
) -> AsyncGenerator[str, None]:
    """Tell of a process as it goes. Each event's id is where to go on from."""
    shown = {"stdout": stdout, "stderr": stderr}
    held: dict[str, bytes] = {"stdout": b"", "stderr": b""}

    def tell(chunk: Chunk, *, last: bool) -> str | None:
        data = held[chunk.stream] + chunk.data
        size = len(data) if last or encoding == "base64" else whole_length(data)
        held[chunk.stream] = data[size:]
        if not size:
            return None
        body: dict[str, Any] = {"stream": chunk.stream, "offset": shown[chunk.stream] + chunk.lost}
        if chunk.lost:
            body["lost"] = chunk.lost
        if encoding == "base64":
            body["base64"] = binascii.b2a_base64(data, newline=False).decode()
        else:
            body["text"] = data[:size].decode(errors="replace")
        shown[chunk.stream] = body["offset"] + size
        return sse.line("output", body, f"{shown['stdout']}:{shown['stderr']}")

    yield sse.line("started", {"process": process.id, "pid": process.pid})
    output = process.output(stdout_from=stdout, stderr_from=stderr)
    try:
        async with contextlib.aclosing(output):
            async for chunk in output:
                if text := tell(chunk, last=False):
                    yield text
        for stream in ("stdout", "stderr"):
            rest = Chunk(stream=stream, offset=shown[stream], data=b"")
            if held[stream] and (text := tell(rest, last=True)):
                yield text
        ended = await process.wait()
    except ClocheError as error:
        yield sse.line("error", problems.describe(error))
        return
    yield sse.line("exit", {"exit_code": ended.code, **_without(asdict(ended), "code")})


def _offsets(event_id: str | None) -> tuple[int, int] | None:
    if event_id is None:
        return None
    stdout, _, stderr = event_id.partition(":")
    if not (stdout.isascii() and stdout.isdigit() and stderr.isascii() and stderr.isdigit()):
        raise BadRequest(
            "Last-Event-ID is not one that a stream gave out.", remedy="Leave it out to start over."
        )
    return int(stdout), int(stderr)


def _view(status: ProcessStatus) -> dict[str, Any]:
    view = _without(asdict(status), "exit")
    if status.exit is None:
        return {**view, "running": True}
    ended = _without(asdict(status.exit), "code")
    return {**view, "running": False, "exit_code": status.exit.code, **ended}


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
