"""Runs one job on one machine, and can take up where another runner was killed.

Every decision is in the history before it is acted on. A process is written
down under an id of our choice before it is started, so that whoever comes next
knows whether it ever ran, attaches to it, and reads on from the last stored byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cloche.core import tracing
from cloche.core.blobs import Blobs
from cloche.core.errors import ClocheError, LimitReached, NoSuchProcess, UserError
from cloche.core.job import CodeStep, Job, Outcome, Reason, ShellStep, State, Step
from cloche.core.process import Chunk, Exit, Stream
from cloche.core.record import Entry, Event, Record
from cloche.core.text import whole_length
from cloche.jobs import inputs, steps, watchdog
from cloche.jobs.artifacts import Collected
from cloche.jobs.watchdog import Breach, Ceilings, Watchdog
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox, new_process_id

FLUSH_S = 0.1
FLUSH_BYTES = 256 * 1024
_SUCCESS = Outcome(state=State.SUCCEEDED, reason=Reason.DONE, exit_code=0)

Offsets = dict[Stream, int]


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
    heard_at: float = 0.0
    """When the step last wrote something, or began."""
    breach: Breach | None = None
    """Why that step is to be ended, if that was decided."""
    cpu_before: float = 0.0
    """What the machine had used when the job came to it."""
    cpu_s: float = 0.0
    """What steps that have ended used, on every machine."""
    earlier_cpu_s: float = 0.0
    """What of that was on machines before this one."""
    network_bytes: int = 0
    """What went in and out of the job's machines, as far as it was written down."""
    kept: Collected | None = None
    """What was kept of what it left, once that is done."""

    def begin_on(self, machine: str, cpu_before: float = 0.0) -> None:
        """Start over: another machine knows nothing of what the last one did."""
        self.step, self.process, self.machine, self.touched = 0, "", machine, False
        self.earlier_cpu_s = self.cpu_s
        self.offsets = {"stdout": 0, "stderr": 0}
        self.breach, self.cpu_before = None, cpu_before

    def take(self, event: Event) -> None:
        match event.kind:
            case "submitted":
                self.traceparent = event.body.get("traceparent", "")
            case "machine" if event.body["machine"] != self.machine:
                self.begin_on(event.body["machine"], event.body.get("cpu_s", 0.0))
            case "step":
                self.runs += not self.touched
                self.touched = True
                self.step, self.process = event.body["step"], event.body.get("process", "")
                self.offsets = {"stdout": 0, "stderr": 0}
                self.heard_at = event.at.timestamp()
            case "output":
                stream = event.body["stream"]
                self.heard_at = event.at.timestamp()
                if event.body.get("offset") is not None:
                    self.offsets[stream] = event.body["offset"] + event.size
            case "limit":
                self.breach = Breach(reason=Reason(event.body["reason"]), error=event.body["error"])
            case "step_ended":
                self.step, self.process, self.breach = event.body["step"] + 1, "", None
                self.cpu_s += event.body.get("cpu_s", 0.0)
            case "network":
                self.network_bytes += event.body["bytes"]
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

    def __init__(
        self,
        record: Record,
        blobs: Blobs,
        worker: str,
        job: Job,
        sandbox: Sandbox,
        ceilings: Ceilings,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._blobs = blobs
        self._record = record
        self._worker = worker
        self._job = job
        self._sandbox = sandbox
        self._ceilings = ceilings
        self._last_words: Sequence[Entry] = ()
        self._env = {**(env or {}), **job.request.env}

    async def run(self, progress: Progress) -> Outcome:
        """Run what is left of the job.

        Raises:
            SandboxLost, GuestMisbehaved: the machine is gone or hostile.
            LeaseLost: another worker has the job.
        """
        limits = self._job.request.limits
        self._watchdog = Watchdog(
            self._sandbox,
            limits,
            self._ceilings,
            began=progress.began or time.time(),
            cpu_before=progress.cpu_before,
        )
        if self._job.request.files and not progress.touched:
            outcome = await self._place_inputs()
            if outcome.state is not State.SUCCEEDED:
                return outcome
        todo = self._job.request.actions()
        for index in range(progress.step, len(todo)):
            if self._watchdog.left_s <= 0:
                return watchdog.out_of_time(limits).outcome()
            with tracing.step(index, todo[index].tool):
                outcome = await self._step(index, todo[index], progress)
                tracing.note_step(outcome)
            progress.process, progress.breach = "", None
            if outcome.state is not State.SUCCEEDED:
                return outcome
        return _SUCCESS

    async def _place_inputs(self) -> Outcome:
        try:
            async with self._watchdog.in_time():
                await inputs.place(self._sandbox, self._job.request, self._blobs)
        except (UserError, LimitReached) as error:
            return Outcome(
                state=State.FAILED, reason=Reason.BAD_STEP, error=f"An input file: {error}"
            )
        except TimeoutError:
            return watchdog.out_of_time(self._job.request.limits).outcome()
        body = {"files": len(self._job.request.files)}
        await self._append(Entry(kind="inputs", body=body))
        return _SUCCESS

    async def _step(self, index: int, step: Step, progress: Progress) -> Outcome:
        try:
            if isinstance(step, ShellStep | CodeStep):
                return await self._run_process(index, step, progress)
            return await self._run_file_call(index, step)
        except (UserError, LimitReached) as error:
            body = {"step": index, "reason": Reason.BAD_STEP, "error": error.message}
            await self._append(Entry(kind="step_ended", body=body))
            return Outcome(
                state=State.FAILED, reason=Reason.BAD_STEP, error=f"Step {index + 1}: {error}"
            )
        except TimeoutError:
            return await self._close(
                index, watchdog.out_of_time(self._job.request.limits).outcome()
            )

    async def _run_file_call(self, index: int, step: Step) -> Outcome:
        await self._append(Entry(kind="step", body={"step": index, "tool": step.tool}))
        async with self._watchdog.in_time():
            said = await steps.do(self._sandbox, step)
        done = Entry(kind="step_ended", body={"step": index, "exit_code": 0})
        output = Entry(kind="output", body={"step": index, "stream": "stdout"}, data=said)
        await self._append(*([output, done] if said else [done]))
        return _SUCCESS

    async def _run_process(
        self, index: int, step: ShellStep | CodeStep, progress: Progress
    ) -> Outcome:
        if progress.process:
            process = await self._take_up(step, progress)
        else:
            progress.process = new_process_id()
            progress.offsets = {"stdout": 0, "stderr": 0}
            body = {"step": index, "tool": step.tool, "process": progress.process}
            await self._append(Entry(kind="step", body=body))
            process = await self._start(step, progress.process)
        following = asyncio.create_task(self._follow(index, process, progress.offsets))
        try:
            breach = progress.breach or await self._watchdog.watch(following, index)
            if breach is None:
                return await self._judge(index, await following)
            if progress.breach is None:
                body = {"step": index, **asdict(breach)}
                await self._append(Entry(kind="limit", body=body))
            ended = await watchdog.end(process, following)
            return await self._close(index, breach.outcome(ended), ended)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _start(self, step: ShellStep | CodeStep, process_id: str) -> Process:
        self._watchdog.heard()
        settings = steps.Settings(env=self._env, timeout_s=self._watchdog.left_s)
        async with self._watchdog.in_time():
            return await steps.start(self._sandbox, step, settings, process_id)

    async def _take_up(self, step: ShellStep | CodeStep, progress: Progress) -> Process:
        """Attach to a process that an earlier runner wrote down, or start it if it did not."""
        try:
            async with self._watchdog.in_time():
                process = await self._sandbox.attach(progress.process)
                status = await process.status()
        except NoSuchProcess:
            progress.offsets = {"stdout": 0, "stderr": 0}
            return await self._start(step, progress.process)
        # What it wrote while nobody was there, it may have written just now.
        stored = (progress.offsets["stdout"], progress.offsets["stderr"])
        wrote = (status.stdout_bytes, status.stderr_bytes) != stored
        self._watchdog.heard(None if wrote else progress.heard_at)
        return process

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
                        self._watchdog.heard()
                        batch.add(chunk)
                        reading = asyncio.ensure_future(anext(output, None))
                    if batch.is_due():
                        await self._append(*batch.take())
            finally:
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, ClocheError, StopAsyncIteration):
                    await reading
        self._last_words = batch.take(last=True)
        return await process.wait()

    async def _judge(self, index: int, ended: Exit) -> Outcome:
        out_of_memory = False
        if ended.signal == 9:
            await self._append()  # What it wrote, before the machine is asked: it may be gone.
            out_of_memory = (await self._sandbox.usage()).oom_kills > 0
        return await self._close(index, _outcome(index, ended, out_of_memory=out_of_memory), ended)

    async def _close(self, index: int, outcome: Outcome, ended: Exit | None = None) -> Outcome:
        body: dict[str, Any] = {"step": index}
        if ended is not None:
            body |= {"exit_code": ended.code, **asdict(ended)}
        if outcome.state is not State.SUCCEEDED:
            body["reason"] = outcome.reason
        await self._append(Entry(kind="step_ended", body=body))
        return outcome

    async def _append(self, *entries: Entry) -> None:
        """Write entries down, after what a step wrote last: mostly that and its end are one."""
        written = [*self._last_words, *entries]
        if written:
            await self._record.append(self._worker, self._job.id, written)
            self._last_words = ()


class _Batch:
    """Output that waits to be stored, so that a chatty process does not cost a commit a line.

    Chunks of one stream in a row become one entry, and none ends within a character:
    whoever reads the history an event at a time can read it as text.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._chunks: list[Chunk] = []
        self._held: dict[Stream, Chunk] = {}
        self._bytes = 0
        self._since = 0.0

    def add(self, chunk: Chunk) -> None:
        if not self._chunks:
            self._since = time.monotonic()
        self._bytes += len(chunk.data)
        if (held := self._held.pop(chunk.stream, None)) is not None:
            self._chunks.append(held)
        last = self._chunks[-1] if self._chunks else None
        if last is not None and last.stream == chunk.stream and not chunk.lost:
            self._chunks[-1] = replace(last, data=last.data + chunk.data)
        else:
            self._chunks.append(chunk)

    def due_in(self) -> float | None:
        if not self._chunks:
            return None
        return max(0.0, self._since + FLUSH_S - time.monotonic())

    def is_due(self) -> bool:
        due_in = self.due_in()
        return due_in is not None and (due_in == 0.0 or self._bytes >= FLUSH_BYTES)

    def take(self, *, last: bool = False) -> Sequence[Entry]:
        """Return what is to be stored; the beginning of a character waits for its rest."""
        chunks, self._chunks, self._bytes = self._chunks, [], 0
        ends = {chunk.stream: index for index, chunk in enumerate(chunks)}
        if last:
            chunks += self._held.values()
        else:
            for stream, index in ends.items():
                chunk = chunks[index]
                size = whole_length(chunk.data)
                if size < len(chunk.data):
                    rest = chunk.data[size:]
                    self._held[stream] = Chunk(stream=stream, offset=chunk.offset + size, data=rest)
                    chunks[index] = replace(chunk, data=chunk.data[:size])
        return [self._entry(chunk) for chunk in chunks if chunk.data or chunk.lost]

    def _entry(self, chunk: Chunk) -> Entry:
        body: dict[str, Any] = {
            "step": self._step,
            "stream": chunk.stream,
            "offset": chunk.offset,
        }
        if chunk.lost:
            body["lost"] = chunk.lost
        return Entry(kind="output", body=body, data=chunk.data)


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
