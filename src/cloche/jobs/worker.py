"""Takes jobs from the queue and sees each to its end.

A worker holds a job by a lease that it renews; if it dies, the lease runs out
and another worker takes the job up, on the very machine, if that still lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Final

from cloche.core import about, tracing
from cloche.core.blobs import Blobs, artifacts_key
from cloche.core.errors import (
    ClocheError,
    GuestMisbehaved,
    LeaseLost,
    LimitReached,
    NoSuchJob,
    NoSuchMachine,
    OperatorError,
    SandboxLost,
    StoreUnavailable,
    UserError,
)
from cloche.core.job import Job, Outcome, Reason, State
from cloche.core.queue import Filter, Queue
from cloche.core.record import Entry, Record
from cloche.jobs import artifacts, watchdog
from cloche.jobs.connections import network_of
from cloche.jobs.machines import Machines
from cloche.jobs.persistence import attempt, see_to_its_end
from cloche.jobs.runner import Progress, Runner, read_progress
from cloche.jobs.sandboxes import Sandboxes
from cloche.sandbox.networks import Networks
from cloche.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)

LEASE: Final = timedelta(seconds=30)
AWAY: Final = timedelta(minutes=5)
"""How long a worker that stops keeps its jobs for its next start: the machines are on its host."""
POLL_S: Final = 0.5
_PATIENCE_S: Final = (1, 2, 4, 8, 15)
"""How long to wait for a store, the first time, the second, and from the last on."""
_NO_CEILINGS: Final = watchdog.Ceilings()
_CANCELLED = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, error="The job was cancelled.")
_FAULT = Outcome(
    state=State.FAILED, reason=Reason.FAULT, error="Cloche itself failed; its log tells how."
)


def renew_every(lease: timedelta) -> timedelta:
    """Return how often a worker renews a lease."""
    # A third, not a half: one renewal may be lost to a restart of the store
    # and the next still arrives before another worker may take the job.
    return lease / 3


class Worker:
    """Runs up to `slots` jobs at once."""

    def __init__(
        self,
        queue: Queue,
        record: Record,
        machines: Machines,
        sandboxes: Sandboxes,
        *,
        name: str,
        slots: int,
        per_tenant: int,
        blobs: Blobs,
        lease: timedelta = LEASE,
        ceilings: watchdog.Ceilings = _NO_CEILINGS,
        networks: Networks | None = None,
    ) -> None:
        self.name = name
        self._queue = queue
        self._record = record
        self._machines = machines
        self._sandboxes = sandboxes
        self._slots = slots
        self._per_tenant = per_tenant
        self._blobs = blobs
        self._lease = lease
        self._ceilings = ceilings
        self._networks = networks or Networks()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        self._taken_up = False
        self._awake = asyncio.Event()
        self.looked_at = time.monotonic()
        """When the queue was last looked at, or could not be."""

    @property
    def busy(self) -> int:
        """How many jobs are in hand, each on a machine or about to get one."""
        return len(self._running)

    def wake(self) -> None:
        """Look at the queue now: something was submitted or cancelled in this process."""
        self._awake.set()

    async def run(self) -> None:
        """Work until cancelled; then leave every job, each with its machine alive."""
        renewing = asyncio.create_task(self._renew())
        try:
            while True:
                self._awake.clear()
                await attempt("worker", self._look())
                self.looked_at = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._awake.wait()
        finally:
            renewing.cancel()
            # A renewal under way would undo how long the jobs are to be kept for us.
            await asyncio.gather(renewing, return_exceptions=True)
            await self._let_go()

    async def _look(self) -> None:
        if not self._taken_up:
            await self._take_up()
            self._taken_up = True
        await self._take()
        await self._stop_cancelled()

    async def _take_up(self) -> None:
        """Go on with what an earlier process of our name held.

        Not by way of the queue: a worker of another host might take it there, and not find
        its machine.
        """
        cursor, running = None, Filter(states=frozenset({State.RUNNING}))
        while True:
            page = await self._queue.list(tenant=None, where=running, cursor=cursor, limit=200)
            held = {job.id: job for job in page.jobs if job.worker == self.name}
            kept = await self._queue.renew(self.name, list(held), lease=self._lease)
            for job_id in kept - self._running.keys():
                body = {"why": "its worker was restarted"}
                await self._record.append(self.name, job_id, [Entry(kind="retried", body=body)])
                self._begin(held[job_id])
            if (cursor := page.next_cursor) is None:
                return

    async def _take(self) -> None:
        free = self._slots - len(self._running)
        if free <= 0:
            return
        taken = await self._queue.acquire(
            self.name, lease=self._lease, limit=free, per_tenant=self._per_tenant
        )
        for job in taken:
            self._begin(job)

    def _begin(self, job: Job) -> None:
        task = asyncio.create_task(self._work(job), name=f"job {job.id}")
        self._running[job.id] = task
        task.add_done_callback(functools.partial(self._forget, job.id))

    def _forget(self, job_id: str, _: asyncio.Task[None]) -> None:
        self._running.pop(job_id, None)
        self._cancelled.discard(job_id)
        self.wake()

    async def _stop_cancelled(self) -> None:
        for job_id in await self._queue.cancelled(self.name):
            if job_id in self._running and job_id not in self._cancelled:
                self._cancelled.add(job_id)
                self._running[job_id].cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(renew_every(self._lease).total_seconds())
            await attempt("worker", self._hold_on())

    async def _hold_on(self) -> None:
        """Hold on to our jobs, let go of lost ones, and take back those of dead workers."""
        held = list(self._running)
        kept = await self._queue.renew(self.name, held, lease=self._lease)
        for job_id in set(held) - kept:
            if job_id in self._running:
                self._running[job_id].cancel()
        if await self._queue.reap():
            self.wake()

    async def _let_go(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, job: Job) -> None:
        about.begin(job_id=job.id, tenant=job.tenant)
        try:
            await self._insist(job)
        except asyncio.CancelledError:
            if job.id in self._cancelled:
                await see_to_its_end(self._end(job, _CANCELLED))
            else:
                await see_to_its_end(self._leave(job))
        except LeaseLost:
            logger.info("job %s: another worker has it", job.id)
        except Exception:
            logger.exception("job %s: a fault of ours", job.id)
            await see_to_its_end(self._end(job, _FAULT))
        finally:
            tracing.end_job()

    async def _insist(self, job: Job) -> None:
        """See a job through, though a store be away for a while: its machine goes on meanwhile."""
        for delay_s in itertools.chain(_PATIENCE_S, itertools.repeat(_PATIENCE_S[-1])):
            try:
                if not job.state.final:
                    return await self._see_through(job)
                # Our last word was heard, but not the answer to it.
                return await self._let_machine_go(job)
            except StoreUnavailable as error:
                logger.warning("job %s: %s Trying again in %s s.", job.id, error, delay_s)
                tracing.end_job()
            await asyncio.sleep(delay_s)
            with contextlib.suppress(StoreUnavailable):
                job = await self._queue.get(job.id)
                if not job.state.final and job.worker != self.name:
                    return None
        raise AssertionError("the delays have no end")

    async def _let_machine_go(self, job: Job) -> None:
        if not await self._sandboxes.keeps(job.id):
            with contextlib.suppress(NoSuchMachine):
                await see_to_its_end((await self._machines.adopt(job.machine)).close())

    async def _leave(self, job: Job) -> None:
        """We are stopping: our next start goes on with the same machine, or anyone without one."""
        try:
            if (await self._queue.get(job.id)).machine:
                await self._queue.renew(self.name, [job.id], lease=AWAY)
            else:
                await self._queue.release(self.name, job.id)
        except NoSuchJob:
            return
        except StoreUnavailable as error:
            logger.warning("job %s: %s Its lease will run out.", job.id, error)

    async def _see_through(self, job: Job) -> None:
        progress = await read_progress(self._record, job.id)
        tracing.begin_job(job, progress.traceparent)
        with tracing.span("machine"):
            sandbox = await self._machine_of(job, progress)
        if sandbox is None:
            return
        if job.cancel_requested:
            await self._finish(job, _CANCELLED, sandbox, progress)
            return
        try:
            outcome = await self._run(job, sandbox, progress)
            outcome = await watchdog.collect(
                outcome,
                self._keep_artifacts(job, sandbox, progress),
                job.request.limits,
                progress.began or time.time(),
            )
        except (SandboxLost, GuestMisbehaved) as error:
            await see_to_its_end(sandbox.close())
            await self._lost(job, error)
            return
        await self._finish(job, outcome, sandbox, progress)

    async def _run(self, job: Job, sandbox: Sandbox, progress: Progress) -> Outcome:
        async with contextlib.AsyncExitStack() as stack:
            try:
                network = network_of(
                    job,
                    sandbox,
                    self._networks,
                    progress.network_bytes,
                    self._record,
                    self.name,
                )
                env = await stack.enter_async_context(network)
            except (UserError, OperatorError, LimitReached) as error:
                told = f"{error.message} {error.remedy}"
                return Outcome(state=State.FAILED, reason=Reason.NOT_STARTED, error=told)
            runner = Runner(self._record, self._blobs, self.name, job, sandbox, self._ceilings, env)
            return await runner.run(progress)

    async def _machine_of(self, job: Job, progress: Progress) -> Sandbox | None:
        """Return the job's machine: the one it ran on, or a fresh one; None when it is over."""
        if job.machine:
            try:
                sandbox = await self._machines.adopt(job.machine)
            except NoSuchMachine as error:
                # A machine on which no step was begun is no loss.
                if (progress.touched and progress.runs > job.request.retries) or (
                    job.cancel_requested
                ):
                    outcome = _CANCELLED if job.cancel_requested else _lost(error)
                    await self._conclude(job, outcome, progress.cpu_s)
                    return None
            else:
                await self._note_machine(job, sandbox, progress, adopted=True)
                return sandbox
        spec = job.request.limits.spec(job.request.image)
        try:
            sandbox = await self._machines.claim(spec, job.request.min_rung)
        except ClocheError as error:
            failed = Outcome(
                state=State.FAILED,
                reason=Reason.NOT_STARTED,
                error=f"{error.message} {error.remedy}",
            )
            await self._conclude(job, failed, progress.cpu_s)
            return None
        try:
            await self._note_machine(job, sandbox, progress, adopted=False)
        except BaseException:
            # Nobody else may know of it, and nothing ran on it.
            await see_to_its_end(sandbox.close())
            raise
        return sandbox

    async def _note_machine(
        self, job: Job, sandbox: Sandbox, progress: Progress, *, adopted: bool
    ) -> None:
        about.note(machine=sandbox.id)
        tracing.note(machine=sandbox.id, rung=sandbox.rung, adopted=adopted)
        cpu_s = 0.0
        if not adopted:
            with contextlib.suppress(SandboxLost):  # The first step will tell.
                cpu_s = (await sandbox.usage()).cpu_s
        body = {"machine": sandbox.id, "rung": sandbox.rung, "adopted": adopted, "cpu_s": cpu_s}
        await self._queue.place(
            self.name,
            job.id,
            machine=sandbox.id,
            rung=sandbox.rung,
            entry=Entry(kind="machine", body=body),
        )
        if progress.machine != sandbox.id:
            progress.begin_on(sandbox.id, cpu_s)

    async def _lost(self, job: Job, error: ClocheError) -> None:
        progress = await read_progress(self._record, job.id)
        if progress.runs <= job.request.retries:
            body = {"why": error.message}
            await self._record.append(self.name, job.id, [Entry(kind="retried", body=body)])
            await self._queue.release(self.name, job.id)
        else:
            await self._conclude(job, _lost(error), progress.cpu_s)

    async def _end(self, job: Job, outcome: Outcome) -> None:
        """Kill what runs, prove it by destroying the machine, and say so."""
        try:
            current = await self._queue.get(job.id)
            progress = await read_progress(self._record, job.id)
            cpu_s = progress.cpu_s
            if current.machine:
                with contextlib.suppress(NoSuchMachine):
                    sandbox = await self._machines.adopt(current.machine)
                    cpu_s = await _cpu_s(sandbox, progress)
                    await sandbox.close()
            await self._conclude(job, outcome, cpu_s)
        except (LeaseLost, NoSuchJob):
            return  # It is over, or another's.
        except StoreUnavailable as error:
            logger.warning("job %s: %s Its lease will run out.", job.id, error)

    async def _keep_artifacts(self, job: Job, sandbox: Sandbox, progress: Progress) -> None:
        with tracing.span("artifacts"):
            kept = await artifacts.keep(sandbox, job.request.artifacts, self._blobs, job.id)
        if not kept.files and job.attempt > 1:
            # What an earlier run left is not what this one did.
            await self._blobs.delete(artifacts_key(job.id))
        progress.kept = kept

    async def _conclude(
        self, job: Job, outcome: Outcome, cpu_s: float, kept: artifacts.Collected | None = None
    ) -> None:
        await self._queue.finish(
            self.name,
            job.id,
            outcome,
            entries=[Entry(kind="artifacts", body=asdict(kept))] if kept else [],
            cpu_s=cpu_s,
            kept_bytes=kept.bytes if kept else 0,
        )
        tracing.note_job(outcome)
        logger.info("job %s: %s, %s", job.id, outcome.state, outcome.reason)

    async def _finish(
        self, job: Job, outcome: Outcome, sandbox: Sandbox, progress: Progress
    ) -> None:
        cpu_s = await _cpu_s(sandbox, progress)
        kept = outcome.state is not State.CANCELLED and outcome.reason is not Reason.CPU
        keep = job.request.keep_alive_s and kept
        if keep:
            await self._sandboxes.keep(job, sandbox)
        await self._conclude(job, outcome, cpu_s, progress.kept)
        if not keep:
            # After the end is told: destroying takes a moment that nobody needs to wait for.
            await see_to_its_end(sandbox.close())


async def _cpu_s(sandbox: Sandbox, progress: Progress) -> float:
    """Return what the job used in all: this machine by the host's count, lost ones by its history.

    The guest's word for a step leaves out what it left running, and may be a lie.
    """
    try:
        here_s = (await sandbox.usage()).cpu_s - progress.cpu_before
        return progress.earlier_cpu_s + here_s
    except SandboxLost:
        return progress.cpu_s


def _lost(error: ClocheError) -> Outcome:
    return Outcome(state=State.FAILED, reason=Reason.LOST_MACHINE, error=error.message)
