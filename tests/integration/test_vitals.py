"""What the parts of a server tell of it, where no whole server is needed to see that."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from cloche.api.server import create_app
from cloche.api.services import Services
from cloche.api.vitals import Vitals
from cloche.core import about
from cloche.core.access import Role
from cloche.core.errors import BackendUnavailable, NoSuchMachine, StoreUnavailable
from cloche.core.image import Image
from cloche.core.job import Request, State
from cloche.core.quota import Quota
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.jobs import census as census_module
from cloche.jobs.census import Census
from cloche.jobs.sandboxes import Sandboxes
from cloche.observe import logs
from cloche.observe.metrics import Metrics
from cloche.sandbox.pool import Pool
from cloche.sandbox.sandbox import Sandbox
from cloche.stores.access import Access
from cloche.stores.blobs import Blobs
from cloche.stores.database import Database
from cloche.stores.outbox import Outbox
from cloche.stores.queue import Queue
from cloche.stores.quotas import Quotas
from cloche.stores.record import Record
from cloche.stores.sessions import Sessions
from cloche.stores.standings import Standings
from cloche.stores.uploads import Uploads
from cloche.testing.fakes import FailingBackend

IMAGE = Image(name="base", digest="0" * 64, layers=(Path("/nowhere"),))


class SlowQueue(Queue):
    """Takes its time to count."""

    def __init__(self, database: Database, delay_s: float) -> None:
        super().__init__(database)
        self.delay_s = delay_s
        self.asked = 0

    async def counts(self) -> Mapping[State, int]:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        return await super().counts()


class NoMachines:
    """Has none to give."""

    async def claim(self, spec: SandboxSpec, min_rung: Rung | None) -> Sandbox:
        raise BackendUnavailable("There are no machines.", remedy="It is a fake.")

    async def adopt(self, machine_id: str) -> Sandbox:
        raise NoSuchMachine(f"There is no machine {machine_id}.", remedy="It is a fake.")


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await Database.open(f"sqlite:///{tmp_path}/jobs.db")
    yield database
    await database.close()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1.2.3", rung="container")


async def test_counting_is_done_by_one_and_rests(database: Database) -> None:
    queue = SlowQueue(database, delay_s=0.05)
    census = Census(queue)

    found = await asyncio.gather(*(census.counts() for _ in range(50)))
    assert (queue.asked, len({id(counts) for counts in found})) == (1, 1)
    await census.counts()
    assert queue.asked == 1

    await queue.submit("a", Request(kind="shell", code="true"))
    await asyncio.sleep(1.5)  # Ten times as long as counting took, and some.
    assert (await census.counts())[State.QUEUED] == 1


async def test_a_count_that_takes_too_long_is_given_up(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census_module, "_PATIENCE_S", 0.1)

    with pytest.raises(StoreUnavailable):
        await Census(SlowQueue(database, delay_s=5)).counts()


async def test_a_pool_that_cannot_start_machines_is_counted(metrics: Metrics) -> None:
    pool = Pool(FailingBackend(), SandboxSpec(), IMAGE, size=1, meters=metrics)
    pool.start()
    try:
        async with asyncio.timeout(5):
            while not metrics.registry.get_sample_value("cloche_pool_failures_total"):
                await asyncio.sleep(0.01)
    finally:
        await pool.close()


async def services(
    database: Database, metrics: Metrics, folder: Path, *, silent_s: float = 0.0
) -> Services:
    queue = Queue(database, meters=metrics)
    census, standings = Census(queue), Standings(database)

    def broken() -> None:
        raise RuntimeError("nobody to wake")

    return Services(
        queue=queue,
        record=Record(database),
        access=Access(database),
        quotas=Quotas(database, Quota()),
        sessions=Sessions(database),
        standings=standings,
        sandboxes=Sandboxes(standings, queue, NoMachines(), home="here"),
        outbox=Outbox(database),
        blobs=await Blobs.open_at(folder.as_uri()),
        uploads=Uploads(database),
        wake=broken,
        rung="container",
        vitals=Vitals(
            census=census,
            meters=metrics,
            scrape=lambda: metrics.scrape(census.counts),
            pool_ready=lambda: 1,
            worker_looked_at=lambda: time.monotonic() - silent_s,
        ),
    )


def client(of: Services) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(of))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_a_silent_worker_is_not_ready(
    database: Database, metrics: Metrics, tmp_path: Path
) -> None:
    async with client(await services(database, metrics, tmp_path, silent_s=31)) as asking:
        answer = await asking.get("/readyz")

    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    assert "31 s" in answer.json()["detail"]


async def test_a_fault_of_ours_is_a_problem_with_an_id_that_the_log_has(
    database: Database, metrics: Metrics, tmp_path: Path, log: io.StringIO
) -> None:
    of = await services(database, metrics, tmp_path)
    _, key = await of.access.create_key(tenant="a", role=Role.MEMBER, name="")

    async with client(of) as asking:
        answer = await asking.post(
            "/v1/jobs",
            json={"kind": "shell", "code": "true"},
            headers={"authorization": f"Bearer {key}"},
        )

    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (500, "fault")
    assert "nobody to wake" not in answer.text
    [line] = [json.loads(line) for line in log.getvalue().splitlines() if "fault" in line]
    assert line["request_id"] == problem["request_id"] == answer.headers["x-request-id"]
    assert line["tenant"] == "a"
    assert "nobody to wake" in line["exception"]
    labels = {"route": "/v1/jobs", "method": "POST", "status": "500"}
    assert metrics.registry.get_sample_value("cloche_http_requests_total", labels) == 1


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What is logged during the test, as JSON."""
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    handler.setFormatter(logs.Json())
    logging.getLogger().addHandler(handler)
    yield sink
    logging.getLogger().removeHandler(handler)


async def test_each_task_logs_what_it_is_about_and_no_other(log: io.StringIO) -> None:
    logger = logging.getLogger("test")

    async def work(job_id: str) -> None:
        about.begin(job_id=job_id)
        await asyncio.sleep(0)
        about.note(machine=f"m{job_id}")
        logger.warning("line one\nline %s", "two")

    await asyncio.gather(*(asyncio.create_task(work(str(number))) for number in range(3)))
    logger.warning("outside")

    *inside, outside = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["machine"] for line in inside] == [f"m{line['job_id']}" for line in inside]
    assert {line["message"] for line in inside} == {"line one\nline two"}
    assert outside.keys() == {"time", "level", "logger", "message"}


def test_debugging_shows_ours_alone() -> None:
    """The database's driver logs every value it is given, at that level."""
    code = (
        "import logging\n"
        "from cloche.observe import logs\n"
        "logs.configure('json', 'debug')\n"
        "logging.getLogger('cloche.api').debug('ours')\n"
        "logging.getLogger('asyncio').debug('theirs')\n"
        "import warnings; warnings.warn('a warning')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in said] == ["cloche.api", "py.warnings"]
