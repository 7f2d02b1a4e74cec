"""Steps that are silent, greedy or stalled, on real machines and on hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from leftovers import leftovers
from serving import Server

from cloche.app import Host, Machines
from cloche.core.blobs import artifacts_key
from cloche.core.job import Job, Reason, Request, State
from cloche.core.record import Entry
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.jobs.sandboxes import Sandboxes
from cloche.jobs.watchdog import COLLECT_S, GRACE_S, KILL_S, Ceilings
from cloche.jobs.worker import Machines as AnyMachines
from cloche.jobs.worker import Worker
from cloche.sandbox.pool import Pool
from cloche.sandbox.sandbox import Sandbox
from cloche.settings import Settings
from cloche.stores.blobs import Blobs
from cloche.stores.database import Database
from cloche.stores.queue import Queue
from cloche.stores.record import Record
from cloche.stores.standings import Standings
from cloche.testing.fakes import DeafMachine, IdleMachine, StallingMachine, answer

OVERTIME_S = GRACE_S + KILL_S + COLLECT_S + 6
"""What a job may outlive its time by, with the most hostile guest; and some, on a busy host."""


class Bench:
    """A queue with workers on it."""

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self.blobs = blobs
        self.queue = Queue(database)
        self.record = Record(database)
        self.standings = Standings(database)

    async def artifacts(self, job_id: str) -> zipfile.ZipFile:
        blob = await self.blobs.find(artifacts_key(job_id))
        assert blob is not None
        return zipfile.ZipFile(self.blobs.open(blob))

    @contextlib.asynccontextmanager
    async def worker(
        self, machines: AnyMachines, ceilings: Ceilings | None = None
    ) -> AsyncIterator[Worker]:
        name = "worker"
        worker = Worker(
            self.queue,
            self.record,
            machines,
            Sandboxes(self.standings, self.queue, machines, home=name),
            name=name,
            slots=4,
            per_tenant=4,
            blobs=self.blobs,
            ceilings=ceilings or Ceilings(),
        )
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def submit(self, code: str, **limits: float) -> str:
        request = {"kind": "shell", "code": code, "limits": limits}
        return (await self.queue.submit("t", Request.model_validate(request))).job.id

    async def end_of(self, job_id: str, timeout_s: float = 30.0) -> Job:
        async with asyncio.timeout(timeout_s):
            while not (job := await self.queue.get(job_id)).state.final:
                await asyncio.sleep(0.02)
        return job

    async def wrote(self, job_id: str, text: bytes) -> None:
        async with asyncio.timeout(20):
            while text not in await self.record.log(job_id, offset=0, limit=1 << 20):
                await asyncio.sleep(0.02)

    async def kinds(self, job_id: str) -> list[str]:
        return [event.kind for event in await self.record.events(job_id)]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    database = await Database.open(f"sqlite:///{tmp_path}/jobs.db")
    yield Bench(database, await Blobs.open_at((tmp_path / "blobs").as_uri()))
    await database.close()


@pytest.fixture
async def real(data: Path) -> AsyncIterator[Machines]:
    host = Host.from_settings(Settings(data=data))
    pool = Pool(host.backend, SandboxSpec(), host.image("base"), size=1)
    pool.start()
    yield Machines(host, pool)
    await pool.close()
    await host.backend.sweep(keep=[])
    assert host.backend.layers() == set(), "a machine was left behind"
    host.backend.close()


def lasted_s(job: Job) -> float:
    assert job.started_at is not None
    assert job.finished_at is not None
    return (job.finished_at - job.started_at).total_seconds()


async def test_a_silent_step_is_ended_and_what_it_left_is_kept(
    bench: Bench, real: Machines
) -> None:
    code = "echo left > left.txt; echo up; setsid sleep 98765 & sleep 98765"
    async with bench.worker(real):
        job_id = await bench.submit(code, silent_s=1)
        job = await bench.end_of(job_id)

    assert (job.state, job.reason) == (State.FAILED, Reason.SILENT)
    assert job.error == "Step 1 wrote nothing for 1 s."
    assert lasted_s(job) >= 1
    with await bench.artifacts(job_id) as archive:
        assert archive.read("left.txt") == b"left\n"
    kinds = await bench.kinds(job_id)
    assert kinds[-4:] == ["limit", "step_ended", "artifacts", "finished"]


async def test_a_step_that_writes_now_and_then_is_left_alone(bench: Bench, real: Machines) -> None:
    code = "for n in 1 2 3 4 5 6; do sleep 0.5; echo $n >&2; done"
    async with bench.worker(real, Ceilings(silent_s=1.5)):
        job = await bench.end_of(await bench.submit(code))

    assert job.state is State.SUCCEEDED, job.error


async def test_a_greedy_job_is_ended(bench: Bench, real: Machines) -> None:
    code = "touch left.txt; for n in 1 2 3; do (while :; do :; done) & done; wait"
    async with bench.worker(real):
        job_id = await bench.submit(code, cpu_s=2)
        job = await bench.end_of(job_id)

    assert (job.state, job.reason) == (State.FAILED, Reason.CPU)
    assert job.error == "The job used more than 2 s of processor time."
    assert (await bench.artifacts(job_id)).namelist() == ["left.txt"]


async def test_a_job_that_sleeps_uses_no_processor_time(bench: Bench, real: Machines) -> None:
    async with bench.worker(real):
        job = await bench.end_of(await bench.submit("sleep 3", cpu_s=1))

    assert job.state is State.SUCCEEDED, job.error


@pytest.mark.parametrize(
    ("asked", "ceiling"), [({"silent_s": 60.0}, 1.0), ({"silent_s": 1.0}, 60.0), ({}, 1.0)]
)
async def test_the_stricter_of_two_bounds_counts(
    bench: Bench, real: Machines, asked: dict[str, float], ceiling: float
) -> None:
    async with bench.worker(real, Ceilings(silent_s=ceiling)):
        job = await bench.end_of(await bench.submit("sleep 60", **asked))

    assert (job.reason, job.error) == (Reason.SILENT, "Step 1 wrote nothing for 1 s.")


async def test_silence_counts_across_a_restart(bench: Bench, real: Machines) -> None:
    async with bench.worker(real):
        job_id = await bench.submit("echo up; sleep 60", silent_s=4)
        await bench.wrote(job_id, b"up")
    await asyncio.sleep(4)
    async with bench.worker(real):
        job = await bench.end_of(job_id)

    assert job.reason is Reason.SILENT
    events = {event.kind: event.at for event in await bench.record.events(job_id)}
    after_s = (events["limit"] - events["retried"]).total_seconds()
    assert after_s < 2, "counted from the last output, not from the restart"


async def test_what_is_written_while_nobody_is_there_is_no_silence(
    bench: Bench, real: Machines
) -> None:
    code = "for n in 1 2 3 4 5 6 7 8 9; do echo $n; sleep 0.5; done"
    async with bench.worker(real):
        job_id = await bench.submit(code, silent_s=1.5)
        await bench.wrote(job_id, b"1")
    await asyncio.sleep(2.5)
    async with bench.worker(real):
        job = await bench.end_of(job_id)

    assert job.state is State.SUCCEEDED, job.error


async def test_processor_time_counts_across_a_restart(bench: Bench, real: Machines) -> None:
    async with bench.worker(real):
        job_id = await bench.submit("echo up; while :; do :; done", cpu_s=3)
        await bench.wrote(job_id, b"up")
    machine = await real.adopt((await bench.queue.get(job_id)).machine)
    async with asyncio.timeout(60):
        while (await machine.usage()).cpu_s < 4:
            await asyncio.sleep(0.1)
    async with bench.worker(real):
        job = await bench.end_of(job_id)

    assert job.reason is Reason.CPU
    (ended,) = [e for e in await bench.record.events(job_id) if e.kind == "step_ended"]
    assert ended.body["cpu_s"] < 6, "what it used meanwhile counts"


async def test_what_was_decided_before_a_kill_is_what_is_told(bench: Bench, real: Machines) -> None:
    async with bench.worker(real):
        job_id = await bench.submit("echo up; sleep 60")
        await bench.wrote(job_id, b"up")
    decided = {"step": 0, "reason": "silent", "error": "Step 1 wrote nothing for 7 s."}
    await bench.record.append("worker", job_id, [Entry(kind="limit", body=decided)])

    async with bench.worker(real):
        job = await bench.end_of(job_id)

    assert (job.reason, job.error) == (Reason.SILENT, "Step 1 wrote nothing for 7 s.")
    assert (await bench.kinds(job_id)).count("limit") == 1


class Fakes:
    """Gives jobs machines of one kind of misbehaviour."""

    def __init__(self, kind: type[IdleMachine]) -> None:
        self._kind = kind
        self.made: list[IdleMachine] = []

    async def claim(self, spec: SandboxSpec, min_rung: Rung | None) -> Sandbox:
        self.made.append(self._kind(spec))
        return Sandbox(self.made[-1])

    async def adopt(self, machine_id: str) -> Sandbox:
        raise NotImplementedError


class StallsAtTheEnd(IdleMachine):
    """Does what it is told, until it is asked for what the job left."""

    async def respond(self, call: str, writer: asyncio.StreamWriter) -> None:
        if call.startswith("DELETE /files"):
            writer.write(answer({}))
        else:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (DeafMachine, {"tool": "shell", "command": "true"}),
        (DeafMachine, {"tool": "write_file", "path": "a", "content": "b"}),
        (DeafMachine, {"tool": "list_files"}),
        (DeafMachine, {"tool": "remove_file", "path": "a"}),
        (StallingMachine, {"tool": "shell", "command": "true"}),
        (StallsAtTheEnd, {"tool": "remove_file", "path": "a"}),
    ],
    ids=lambda value: value["tool"] if isinstance(value, dict) else value.__name__,
)
async def test_nothing_outlives_a_jobs_time_by_more_than_a_few_seconds(
    bench: Bench, kind: type[IdleMachine], step: dict[str, object]
) -> None:
    machines = Fakes(kind)
    request = Request.model_validate({"steps": [step], "limits": {"wall_s": 1}, "retries": 3})
    async with bench.worker(machines):
        job_id = (await bench.queue.submit("t", request)).job.id
        job = await bench.end_of(job_id)
        async with asyncio.timeout(5):
            while not machines.made[0].destroyed:
                await asyncio.sleep(0.02)

    assert (job.state, job.reason) == (State.FAILED, Reason.TIMEOUT), job.error
    assert job.error.startswith("The job did not end within 1 s.")
    assert lasted_s(job) < 1 + OVERTIME_S
    assert len(machines.made) == 1, "a job that ran out of time is not run again"


async def test_a_silent_step_on_a_machine_that_kills_nothing_is_ended_with_it(
    bench: Bench,
) -> None:
    machines = Fakes(StallingMachine)
    async with bench.worker(machines):
        job = await bench.end_of(await bench.submit("true", silent_s=1, wall_s=3))

    assert job.reason is Reason.SILENT
    assert machines.made[0].destroyed
    assert lasted_s(job) < 3 + OVERTIME_S


def test_a_killed_server_still_ends_what_is_silent(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(tmp_path, CLOCHE_MAX_SILENT_S="3")
    try:
        job_id = server.submit(kind="shell", code="echo up; sleep 600")
        while not server.log(job_id):
            time.sleep(0.02)
        began = time.monotonic()
        server.stop(signal.SIGKILL)
        server.start()
        status = server.end_of(job_id)
        took_s = time.monotonic() - began
        assert (status["state"], status["reason"]) == ("failed", "silent")
        assert status["stdout"] == "up\n"
        assert took_s > 2.5
    finally:
        server.stop()
    assert leftovers(tmp_path) == []
