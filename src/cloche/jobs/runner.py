"""Runs one job on one machine, and can take up where another runner was killed.

Every decision is in the history before it is acted on. A process is written
down under an id of our choice before it is started, so that whoever comes next
knows whether it ever ran, attaches to it, and reads on from the last stored byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cloche.core import tracing
from cloche.core.errors import ClocheError, NoSuchProcess, UserError
from cloche.core.job import CodeStep, Job, Outcome, Reason, ShellStep, State, Step
from cloche.core.process import Chunk, Exit
from cloche.core.record import Entry, Event, Record
from cloche.jobs import steps
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox, new_process_id

FLUSH_S = 0.1
FLUSH_BYTES = 64 * 1024
_SUCCESS = Outcome(state=State.SUCCEEDED, reason=Reason.DONE, exit_code=0)

Offsets = dict[Literal["stdout", "stderr"], int]


@dataclass(slots=True)
class Progress:
    """How far a job has come, told from its history alone."""

    step: int = 0
    """The step to run next, or to take up again."""
    process: str = ""
    """The process of that step, if it was written down."""
    offsets: Offsets = field(default_factory=lambda: {"stdout": 0, "stderr": 0})
    machine: str = ""
    touched: bool = False
    """Whether a step was begun on that machine."""
    runs: int = 0
    """On how many machines a step was begun."""
    began: float | None = None
    traceparent: str = ""
    """The span of whoever asked for the job."""

    def begin_on(self, machine: str) -> None:
        """Start over: another machine knows nothing of what the last one did."""
        self.step, self.process, self.machine, self.touched = 0, "", machine, False
        self.offsets = {"stdout": 0, "stderr": 0}

    def take(self, event: Event) -> None:
        match event.kind:
            case "submitted":
                self.traceparent = event.body.get("traceparent", "")
            case "machine" if event.body["machine"] != self.machine:
                self.begin_on(event.body["machine"])
            case "step":
                self.runs += not self.touched
                self.touched = True
                self.step, self.process = event.body["step"], event.body.get("process", "")
                self.offsets = {"stdout": 0, "stderr": 0}
            case "output":
                stream = event.body["stream"]
                if event.body.get("offset") is not None:
                    self.offsets[stream] = event.body["offset"] + event.size
            case "step_ended":
                self.step, self.process = event.body["step"] + 1, ""
            case _:
                pass


async def read_progress(record: Record, job_id: str) -> Progress:
    progress = Progress()
    after = 0
    while batch := await record.events(job_id, after=after, data=False):
        for event in batch:
            progress.take(event)
            if event.kind == "started" and progress.began is None:
                progress.began = event.at.timestamp()
        after = batch[-1].seq
    return progress


class Runner:
    """One job on one machine."""

    def __init__(self, record: Record, worker: str, job: Job, sandbox: Sandbox) -> None:
        self._record = record
        self._worker = worker
        self._job = job
        self._sandbox = sandbox

    async def run(self, progress: Progress) -> Outcome:
        """Run what is left of the job.

        Raises:
            SandboxLost, GuestMisbehaved: the machine is gone or hostile.
            LeaseLost: another worker has the job.
        """
        began = progress.began or time.time()
        todo = self._job.request.actions()
        for index in range(progress.step, len(todo)):
            left_s = began + self._job.request.limits.wall_s - time.time()
            if left_s <= 0:
                return _timed_out(self._job.request.limits.wall_s)
            with tracing.step(index, todo[index].tool):
                outcome = await self._step(index, todo[index], left_s, progress)
                tracing.note_step(outcome)
            progress.process = ""
            if outcome.state is not State.SUCCEEDED:
                return outcome
        return _SUCCESS

    async def _step(self, index: int, step: Step, left_s: float, progress: Progress) -> Outcome:
        try:
            if isinstance(step, ShellStep | CodeStep):
                ended = await self._run_process(index, step, left_s, progress)
                return await self._judge(index, ended)
            await self._append(Entry(kind="step", body={"step": index, "tool": step.tool}))
            said = await steps.do(self._sandbox, step)
        except UserError as error:
            body = {"step": index, "reason": Reason.BAD_STEP, "error": error.message}
            await self._append(Entry(kind="step_ended", body=body))
            return Outcome(
                state=State.FAILED, reason=Reason.BAD_STEP, error=f"Step {index + 1}: {error}"
            )
        done = Entry(kind="step_ended", body={"step": index, "exit_code": 0})
        output = Entry(kind="output", body={"step": index, "stream": "stdout"}, data=said)
        await self._append(*([output, done] if said else [done]))
        return _SUCCESS

    async def _run_process(
        self, index: int, step: ShellStep | CodeStep, left_s: float, progress: Progress
    ) -> Exit:
        settings = steps.Settings(env=self._job.request.env, timeout_s=left_s)
        if progress.process:
            with contextlib.suppress(NoSuchProcess):
                process = await self._sandbox.attach(progress.process)
                return await self._follow(index, process, progress.offsets)
            process_id = progress.process  # Written down, but never started.
        else:
            process_id = new_process_id()
            body = {"step": index, "tool": step.tool, "process": process_id}
            await self._append(Entry(kind="step", body=body))
        process = await steps.start(self._sandbox, step, settings, process_id)
        return await self._follow(index, process, {"stdout": 0, "stderr": 0})

    async def _follow(self, index: int, process: Process, offsets: Offsets) -> Exit:
        """Store output as it comes: a batch when it is large, or when it is a moment old."""
        batch = _Batch(index)
        output = process.output(stdout_from=offsets["stdout"], stderr_from=offsets["stderr"])
        async with contextlib.aclosing(output):
            reading = asyncio.ensure_future(anext(output, None))
            try:
                while True:
                    await asyncio.wait((reading,), timeout=batch.due_in())
                    if reading.done():
                        chunk = reading.result()
                        if chunk is None:
                            break
                        batch.add(chunk)
                        reading = asyncio.ensure_future(anext(output, None))
                    if batch.is_due():
                        await self._append(*batch.take())
            finally:
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, ClocheError, StopAsyncIteration):
                    await reading
        if entries := batch.take():
            await self._append(*entries)
        return await process.wait()

    async def _judge(self, index: int, ended: Exit) -> Outcome:
        out_of_memory = ended.signal == 9 and (await self._sandbox.usage()).oom_kills > 0
        outcome = _outcome(index, ended, out_of_memory=out_of_memory)
        body: dict[str, Any] = {"step": index, "exit_code": ended.code, **asdict(ended)}
        if outcome.state is not State.SUCCEEDED:
            body["reason"] = outcome.reason
        await self._append(Entry(kind="step_ended", body=body))
        return outcome

    async def _append(self, *entries: Entry) -> None:
        await self._record.append(self._worker, self._job.id, entries)


class _Batch:
    """Output that waits to be stored, so that a chatty process does not cost a commit a line."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._entries: list[Entry] = []
        self._bytes = 0
        self._since = 0.0

    def add(self, chunk: Chunk) -> None:
        if not self._entries:
            self._since = time.monotonic()
        body: dict[str, Any] = {
            "step": self._step,
            "stream": chunk.stream,
            "offset": chunk.offset,
        }
        if chunk.lost:
            body["lost"] = chunk.lost
        self._entries.append(Entry(kind="output", body=body, data=chunk.data))
        self._bytes += len(chunk.data)

    def due_in(self) -> float | None:
        if not self._entries:
            return None
        return max(0.0, self._since + FLUSH_S - time.monotonic())

    def is_due(self) -> bool:
        due_in = self.due_in()
        return due_in is not None and (due_in == 0.0 or self._bytes >= FLUSH_BYTES)

    def take(self) -> Sequence[Entry]:
        entries, self._entries, self._bytes = self._entries, [], 0
        return entries


def _outcome(index: int, ended: Exit, *, out_of_memory: bool) -> Outcome:
    if ended.code == 0 and not ended.timed_out:
        return _SUCCESS
    reason = Reason.EXIT_CODE
    if ended.timed_out:
        reason = Reason.TIMEOUT
    elif out_of_memory:
        reason = Reason.OUT_OF_MEMORY
    why = "ran out of memory" if out_of_memory else f"ended with {ended.reason}"
    return Outcome(
        state=State.FAILED,
        reason=reason,
        exit_code=ended.code,
        error=f"Step {index + 1} {why}.",
    )


def _timed_out(wall_s: float) -> Outcome:
    return Outcome(
        state=State.FAILED,
        reason=Reason.TIMEOUT,
        error=f"The job did not end within {wall_s:g} s.",
    )
