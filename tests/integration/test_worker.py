"""Jobs run by a real worker, on real machines."""

from __future__ import annotations

import asyncio
import contextlib
import zipfile
from collections.abc import AsyncIterable, AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from cloche.app import Host, Machines
from cloche.core.blobs import artifacts_key
from cloche.core.errors import StoreUnavailable
from cloche.core.job import Job, Reason, Request, State
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.jobs.sandboxes import Sandboxes
from cloche.jobs.worker import LEASE, Worker
from cloche.sandbox.pool import Pool
from cloche.sandbox.sandbox import Sandbox
from cloche.settings import Settings
from cloche.stores.blobs import Blobs
from cloche.stores.database import Database
from cloche.stores.queue import Queue
from cloche.stores.record import Record
from cloche.stores.standings import Standings


class Bench:
    """A queue with workers on it."""

    def __init__(self, data: Path, host: Host, database: Database, blobs: Blobs) -> None:
        self.data = data
        self.host = host
        self.blobs = blobs
        self.queue = Queue(database)
        self.record = Record(database)
        self.standings = Standings(database)

    @contextlib.asynccontextmanager
    async def worker(
        self, slots: int = 4, machines: type[Machines] = Machines, lease: timedelta = LEASE
    ) -> AsyncIterator[Worker]:
        pool = Pool(self.host.backend, SandboxSpec(), self.host.image("base"), size=1)
        pool.start()
        name, given = "worker", machines(self.host, pool)
        worker = Worker(
            self.queue,
            self.record,
            given,
            Sandboxes(self.standings, self.queue, given, home=name),
            name=name,
            slots=slots,
            per_tenant=slots,
            blobs=self.blobs,
            lease=lease,
        )
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await pool.close()

    async def submit(self, **request: object) -> str:
        return (await self.queue.submit("t", Request.model_validate(request))).job.id

    async def end_of(self, job_id: str, timeout_s: float = 30.0) -> Job:
        async with asyncio.timeout(timeout_s):
            while not (job := await self.queue.get(job_id)).state.final:
                await asyncio.sleep(0.02)
        return job

    async def log(self, job_id: str) -> bytes:
        return await self.record.log(job_id, offset=0, limit=1 << 24)

    async def kinds(self, job_id: str) -> list[str]:
        return [event.kind for event in await self.record.events(job_id)]


@pytest.fixture
async def bench(data: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    host = Host.from_settings(Settings(data=data))
    database = await Database.open(f"sqlite:///{tmp_path}/jobs.db")
    blobs = await Blobs.open_at((tmp_path / "blobs").as_uri())
    yield Bench(tmp_path, host, database, blobs)
    await database.close()
    await host.backend.sweep(keep=[])
    assert host.backend.layers() == set(), "a machine was left behind"
    host.backend.close()


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("python", "print(6*7)"),
        ("typescript", "enum A { B = 42 }; console.log(A.B)"),
        ("javascript", "console.log(6*7)"),
        ("shell", "echo $((6*7))"),
    ],
)
async def test_code_of_each_kind_runs_to_its_end(bench: Bench, kind: str, code: str) -> None:
    async with bench.worker():
        job_id = await bench.submit(kind=kind, code=code)
        job = await bench.end_of(job_id)

    assert (job.state, job.exit_code, job.rung) == (State.SUCCEEDED, 0, bench.host.backend.rung)
    assert await bench.log(job_id) == b"42\n"
    assert await bench.kinds(job_id) == [
        *("submitted", "started", "machine", "step", "output"),
        *("step_ended", "artifacts", "finished"),
    ]


async def test_steps_share_a_machine_and_leave_a_zip(bench: Bench) -> None:
    async with bench.worker():
        job_id = await bench.submit(
            steps=[
                {"tool": "write_file", "path": "in.txt", "content": "three\nblind\nmice\n"},
                {"tool": "shell", "command": "mkdir -p out && wc -l < in.txt > out/count"},
                {"tool": "python", "code": "import sys; print('to stderr', file=sys.stderr)"},
                {"tool": "read_file", "path": "out/count"},
                {"tool": "move_file", "path": "in.txt", "to": "out/input"},
                {"tool": "list_files", "path": "out"},
            ]
        )
        job = await bench.end_of(job_id)
    archive = await bench.blobs.find(artifacts_key(job_id))
    assert job.state is State.SUCCEEDED, job.error
    log = await bench.log(job_id)
    assert b"to stderr\n3\n" in log, log
    assert archive is not None
    with zipfile.ZipFile(bench.blobs.open(archive)) as zipped:
        assert zipped.namelist() == ["out/count", "out/input"]
        assert zipped.read("out/count") == b"3\n"


async def test_a_failing_step_ends_the_job_and_says_which(bench: Bench) -> None:
    async with bench.worker():
        job_id = await bench.submit(
            steps=[
                {"tool": "shell", "command": "echo one"},
                {"tool": "shell", "command": "exit 3"},
                {"tool": "shell", "command": "echo never"},
            ]
        )
        job = await bench.end_of(job_id)

    assert (job.state, job.reason, job.exit_code) == (State.FAILED, Reason.EXIT_CODE, 3)
    assert job.error == "Step 2 ended with exit code 3."
    assert await bench.log(job_id) == b"one\n"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"kind": "shell", "code": "sleep 60", "limits": {"wall_s": 0.5}}, Reason.TIMEOUT),
        (
            {"steps": [{"tool": "shell", "command": "sleep 60", "timeout_s": 0.5}]},
            Reason.TIMEOUT,
        ),
        (
            {
                "kind": "python",
                "code": "x = bytearray(1 << 30)",
                "limits": {"memory_mib": 256},
            },
            Reason.OUT_OF_MEMORY,
        ),
        ({"steps": [{"tool": "read_file", "path": "nothing"}]}, Reason.BAD_STEP),
        ({"kind": "shell", "code": "true", "min_rung": "firecracker"}, Reason.NOT_STARTED),
        ({"kind": "shell", "code": "true", "image": "other"}, Reason.NOT_STARTED),
    ],
    ids=["wall time", "step time", "memory", "bad step", "rung", "image"],
)
async def test_a_job_that_cannot_go_on_says_why(
    bench: Bench, request_: dict[str, object], reason: Reason
) -> None:
    async with bench.worker():
        job = await bench.end_of(await bench.submit(**request_))

    assert (job.state, job.reason) == (State.FAILED, reason), job.error
    assert job.error


async def test_cancelling_a_running_job_kills_it_and_its_machine(bench: Bench) -> None:
    async with bench.worker() as worker:
        job_id = await bench.submit(kind="shell", code="echo up; setsid sleep 98765 & sleep 98765")
        async with asyncio.timeout(20):
            while await bench.log(job_id) != b"up\n":
                await asyncio.sleep(0.02)
        machine = (await bench.queue.get(job_id)).machine
        await bench.queue.cancel(job_id)
        worker.wake()
        job = await bench.end_of(job_id)

    assert (job.state, job.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert not (bench.host.backend._machines / machine).exists()


async def test_a_job_goes_on_where_a_stopped_worker_left_it(bench: Bench) -> None:
    code = "import time\nfor n in range(40):\n    print(n, flush=True)\n    time.sleep(0.05)\n"
    async with bench.worker():
        job_id = await bench.submit(kind="python", code=code)
        async with asyncio.timeout(20):
            while b"5\n" not in await bench.log(job_id):
                await asyncio.sleep(0.02)
    assert (await bench.queue.get(job_id)).state is State.RUNNING

    async with bench.worker():
        job = await bench.end_of(job_id)

    assert job.state is State.SUCCEEDED, job.error
    whole = "".join(f"{number}\n" for number in range(40)).encode()
    assert await bench.log(job_id) == whole, "a gap or a repeat"
    assert (await bench.kinds(job_id)).count("step") == 1, "the process was started once"


@pytest.mark.parametrize(
    ("retries", "state"), [(0, State.FAILED), (1, State.SUCCEEDED)], ids=["no retry", "retry"]
)
async def test_a_lost_machine_is_retried_or_failed_by_policy(
    bench: Bench, retries: int, state: State
) -> None:
    code = "test -e /tmp/x || { touch /tmp/x; sleep 1; }; echo done"
    async with bench.worker():
        job_id = await bench.submit(kind="shell", code=code, retries=retries)
        async with asyncio.timeout(20):
            while "step" not in await bench.kinds(job_id):
                await asyncio.sleep(0.02)
        machine = (await bench.queue.get(job_id)).machine
        await (await bench.host.backend.adopt(machine)).destroy()
        job = await bench.end_of(job_id)

    assert job.state is state, job.error
    if state is State.FAILED:
        assert job.reason is Reason.LOST_MACHINE
    else:
        assert "retried" in await bench.kinds(job_id)


class AwayAtFirst(Blobs):
    """Cannot be reached when the first zip is to be kept."""

    away = True

    async def put(self, key: str, pieces: AsyncIterable[bytes]) -> None:
        if self.away:
            self.away = False
            raise StoreUnavailable("It is away.", remedy="Wait.")
        await super().put(key, pieces)


async def test_a_job_ends_with_its_zip_though_the_blob_store_was_away(bench: Bench) -> None:
    store = await Blobs.open_at((bench.data / "blobs").as_uri())
    bench.blobs = AwayAtFirst(store._store)
    async with bench.worker(lease=timedelta(seconds=1)):
        job_id = await bench.submit(kind="shell", code="echo once; echo kept > kept.txt")
        job = await bench.end_of(job_id)

    assert job.state is State.SUCCEEDED, job.error
    assert await bench.log(job_id) == b"once\n"
    assert await bench.blobs.find(artifacts_key(job_id)) is not None


async def test_many_jobs_at_once_all_end(bench: Bench) -> None:
    async with bench.worker(slots=4):
        ids = [await bench.submit(kind="python", code=f"print({n})") for n in range(12)]
        ended = [await bench.end_of(job_id, 60) for job_id in ids]

    assert {job.state for job in ended} == {State.SUCCEEDED}
    assert [await bench.log(job_id) for job_id in ids] == [f"{n}\n".encode() for n in range(12)]


class FaultyAtFirst(Machines):
    """Fails the first claim as only a mistake of ours would."""

    failed = False

    async def claim(self, spec: SandboxSpec, min_rung: Rung | None) -> Sandbox:
        sandbox = await super().claim(spec, min_rung)
        if not self.failed:
            self.failed = True
            await sandbox.close()
            raise RuntimeError("a mistake of ours")
        return sandbox


async def test_a_fault_of_ours_fails_its_job_and_no_other(bench: Bench) -> None:
    async with bench.worker(slots=1, machines=FaultyAtFirst):
        first = await bench.end_of(await bench.submit(kind="shell", code="true"))
        second = await bench.end_of(await bench.submit(kind="shell", code="true"))

    assert (first.state, first.reason) == (State.FAILED, Reason.FAULT)
    assert "log" in first.error
    assert second.state is State.SUCCEEDED
