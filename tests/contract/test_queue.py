"""One set of checks for the queue, on every database it runs on."""

from __future__ import annotations

import asyncio
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from cloche.core.errors import (
    BadRequest,
    BadSettings,
    IdempotencyConflict,
    JobNotOver,
    LeaseLost,
    NoSuchJob,
    StoreUnavailable,
)
from cloche.core.job import Outcome, Reason, Request, State
from cloche.core.queue import Filter
from cloche.core.record import Entry
from cloche.core.rung import Rung
from cloche.observe.metrics import Metrics
from cloche.stores.database import Database
from cloche.stores.queue import Queue
from cloche.stores.record import Record
from cloche.stores.tables import metadata

HOUR = timedelta(hours=1)
EXPIRED = timedelta(seconds=-1)
DONE = Outcome(state=State.SUCCEEDED, reason=Reason.DONE, exit_code=0)


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database)


def python(code: str = "print(1)", **options: object) -> Request:
    return Request.model_validate({"kind": "python", "code": code, **options})


async def place(queue: Queue, worker: str, job_id: str, machine: str) -> None:
    entry = Entry(kind="machine", body={"machine": machine})
    await queue.place(worker, job_id, machine=machine, rung=Rung.CONTAINER, entry=entry)


async def submit(queue: Queue, tenant: str = "a", **options: object) -> str:
    return (await queue.submit(tenant, python(**options))).job.id


async def take(
    queue: Queue, worker: str = "w1", *, limit: int = 100, per_tenant: int = 100
) -> list[str]:
    found = await queue.acquire(worker, lease=HOUR, limit=limit, per_tenant=per_tenant)
    return [job.id for job in found]


async def test_the_migrations_make_the_tables_of_today(database: Database) -> None:
    def differences(connection: sa.Connection) -> list[object]:
        return compare_metadata(MigrationContext.configure(connection), metadata)

    assert await database.read(differences) == []


async def test_a_submitted_job_is_there_as_it_was_asked_for(queue: Queue) -> None:
    request = Request.model_validate(
        {
            "steps": [{"tool": "shell", "command": "echo ü"}, {"tool": "read_file", "path": "a"}],
            "labels": {"team": "x"},
            "limits": {"memory_mib": 128},
            "min_rung": "container",
            "priority": 7,
        }
    )

    made = await queue.submit("a", request)

    found = await queue.get(made.job.id)
    assert made.created
    assert found == made.job
    assert (found.request, found.state, found.attempt) == (request, State.QUEUED, 0)
    assert found.created_at.tzinfo is not None


async def test_the_same_key_makes_one_job(queue: Queue) -> None:
    first = await queue.submit("a", python(idempotency_key="k"))
    again = await queue.submit("a", python(idempotency_key="k"))
    other = await queue.submit("b", python(idempotency_key="k"))

    assert (again.created, again.job.id) == (False, first.job.id)
    assert other.created, "keys of one tenant are nothing to another"
    with pytest.raises(IdempotencyConflict):
        await queue.submit("a", python("print(2)", idempotency_key="k"))


async def test_the_same_key_makes_one_job_when_many_submit_at_once(queue: Queue) -> None:
    made = await asyncio.gather(
        *(queue.submit("a", python(idempotency_key="k")) for _ in range(20))
    )

    assert len({submitted.job.id for submitted in made}) == 1
    assert sum(submitted.created for submitted in made) == 1


async def test_jobs_are_taken_by_priority_and_then_by_age(queue: Queue) -> None:
    low = await submit(queue, priority=-1)
    old = await submit(queue)
    new = await submit(queue)
    high = await submit(queue, priority=5)

    assert await take(queue) == [high, old, new, low]
    assert await take(queue) == []


async def test_a_taken_job_says_who_has_it(queue: Queue) -> None:
    job_id = await submit(queue)
    await take(queue, "w1")

    job = await queue.get(job_id)
    assert (job.state, job.worker, job.attempt) == (State.RUNNING, "w1", 1)
    assert job.started_at is not None


async def test_no_job_is_taken_twice_however_many_workers_ask(queue: Queue) -> None:
    submitted = {await submit(queue, tenant=f"t{number % 5}") for number in range(60)}
    taken: list[str] = []

    async def work(name: str) -> None:
        idle = 0
        while idle < 3:
            batch = await take(queue, name, limit=3)
            taken.extend(batch)
            idle = 0 if batch else idle + 1
            await asyncio.sleep(0)

    await asyncio.gather(*(work(f"w{number}") for number in range(8)))

    assert len(taken) == len(set(taken))
    assert set(taken) == submitted


async def test_a_tenant_that_floods_the_queue_does_not_starve_another(queue: Queue) -> None:
    for _ in range(20):
        await submit(queue, "loud")
    quiet = await submit(queue, "quiet")

    first = await take(queue, limit=4, per_tenant=10)

    assert quiet in first
    assert len(first) == 4


async def test_a_tenant_runs_no_more_than_its_share(queue: Queue) -> None:
    for _ in range(5):
        await submit(queue, "a")
    assert len(await take(queue, per_tenant=2)) == 2
    assert await take(queue, per_tenant=2) == []

    running = await queue.list(tenant="a", where=Filter(states=frozenset({State.RUNNING})))
    await queue.finish("w1", running.jobs[0].id, DONE)

    assert len(await take(queue, per_tenant=2)) == 1


async def test_finishing_ends_a_job_for_good(queue: Queue) -> None:
    job_id = await submit(queue)
    await take(queue)
    await place(queue, "w1", job_id, "m1")

    outcome = Outcome(state=State.FAILED, reason=Reason.EXIT_CODE, exit_code=3, error="no")
    job = await queue.finish("w1", job_id, outcome)

    assert (job.state, job.reason, job.exit_code, job.error) == (
        State.FAILED,
        Reason.EXIT_CODE,
        3,
        "no",
    )
    assert (job.machine, job.rung, job.worker) == ("m1", Rung.CONTAINER, "")
    assert job.finished_at is not None
    with pytest.raises(LeaseLost):
        await queue.finish("w1", job_id, DONE)


async def test_only_the_holder_may_finish_or_place(queue: Queue) -> None:
    job_id = await submit(queue)
    await take(queue, "w1")

    with pytest.raises(LeaseLost):
        await queue.finish("w2", job_id, DONE)
    with pytest.raises(LeaseLost):
        await place(queue, "w2", job_id, "m")


async def test_a_dead_workers_job_goes_back_with_its_machine_noted(queue: Queue) -> None:
    job_id = await submit(queue)
    await queue.acquire("dead", lease=HOUR, limit=1, per_tenant=1)
    await place(queue, "dead", job_id, "m1")
    assert await queue.reap() == []
    await queue.renew("dead", [job_id], lease=EXPIRED)

    (reaped,) = await queue.reap()

    assert (reaped.id, reaped.state, reaped.machine) == (job_id, State.QUEUED, "m1")
    assert await take(queue, "next") == [job_id]
    assert (await queue.get(job_id)).attempt == 2
    with pytest.raises(LeaseLost):
        await queue.finish("dead", job_id, DONE)


async def test_the_machines_of_jobs_that_are_not_over_are_known(queue: Queue) -> None:
    mine, over = await submit(queue), await submit(queue)
    await take(queue, "w1")
    await place(queue, "w1", mine, "m1")
    await place(queue, "w1", over, "m2")

    assert await queue.machines() == {"m1", "m2"}
    await queue.finish("w1", over, DONE)
    await queue.release("w1", mine)
    assert await queue.machines() == {"m1"}


async def test_a_renewed_lease_is_not_reaped(queue: Queue) -> None:
    job_id = await submit(queue)
    await queue.acquire("w1", lease=EXPIRED, limit=1, per_tenant=1)

    assert await queue.renew("w1", [job_id, "0" * 16], lease=HOUR) == {job_id}
    assert await queue.reap() == []
    assert await queue.renew("w2", [job_id], lease=HOUR) == set()


async def test_a_released_job_can_be_taken_by_another(queue: Queue) -> None:
    job_id = await submit(queue)
    await take(queue, "w1")
    await queue.release("w1", job_id)
    await queue.release("w1", job_id)

    assert await take(queue, "w2") == [job_id]


async def test_cancelling_a_queued_job_ends_it(queue: Queue) -> None:
    job_id = await submit(queue)

    job = await queue.cancel(job_id, tenant="a")

    assert (job.state, job.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert await take(queue) == []
    assert (await queue.cancel(job_id)).state is State.CANCELLED


async def test_cancelling_a_running_job_asks_its_worker(queue: Queue) -> None:
    job_id = await submit(queue)
    await take(queue)

    job = await queue.cancel(job_id)

    assert (job.state, job.cancel_requested) == (State.RUNNING, True)
    assert await queue.cancelled("w1") == {job_id}
    assert await queue.cancelled("w2") == set()


async def test_cancelling_a_job_whose_worker_died_is_left_to_the_next(queue: Queue) -> None:
    job_id = await submit(queue)
    await take(queue, "dead")
    await place(queue, "dead", job_id, "m1")
    await queue.renew("dead", [job_id], lease=EXPIRED)
    await queue.reap()

    job = await queue.cancel(job_id)

    assert (job.state, job.cancel_requested) == (State.QUEUED, True)
    assert await take(queue, "next") == [job_id]


async def test_another_tenants_job_is_not_there(queue: Queue) -> None:
    job_id = await submit(queue, "a")

    for call in (queue.get, queue.cancel, queue.delete):
        with pytest.raises(NoSuchJob):
            await call(job_id, tenant="b")
    assert (await queue.get(job_id, tenant="a")).state is State.QUEUED


async def test_pages_hold_every_job_once(queue: Queue) -> None:
    submitted = [await submit(queue) for _ in range(25)]
    seen: list[str] = []
    cursor = None
    for _ in range(10):
        page = await queue.list(tenant="a", where=Filter(), cursor=cursor, limit=10)
        seen += [job.id for job in page.jobs]
        cursor = page.next_cursor
        if cursor is None:
            break

    assert seen == submitted[::-1]


@pytest.mark.parametrize("cursor", ["x", "e30=", "W10=", "WzFlOTk5LDFd", "…"])
async def test_a_made_up_cursor_is_refused(queue: Queue, cursor: str) -> None:
    with pytest.raises(BadRequest):
        await queue.list(tenant=None, where=Filter(), cursor=cursor)


async def test_lists_can_be_narrowed(queue: Queue) -> None:
    red = await submit(queue, labels={"colour": "red"})
    await submit(queue, labels={"colour": "blue"})
    plain = await submit(queue)
    await queue.cancel(plain)

    by_label = await queue.list(tenant="a", where=Filter(labels={"colour": "red"}))
    by_state = await queue.list(tenant="a", where=Filter(states=frozenset({State.CANCELLED})))

    assert [job.id for job in by_label.jobs] == [red]
    assert [job.id for job in by_state.jobs] == [plain]


async def test_only_a_job_that_is_over_can_be_deleted(queue: Queue) -> None:
    job_id = await submit(queue)
    with pytest.raises(JobNotOver):
        await queue.delete(job_id)
    await queue.cancel(job_id)

    await queue.delete(job_id)

    with pytest.raises(NoSuchJob):
        await queue.get(job_id)


async def test_counts_tell_every_state(queue: Queue) -> None:
    await submit(queue)
    await submit(queue)
    await take(queue, limit=1)

    counts = await queue.counts()

    assert counts[State.QUEUED] == counts[State.RUNNING] == 1
    assert set(counts) == set(State)


@pytest.fixture
def record(database: Database) -> Record:
    return Record(database)


async def test_a_history_tells_a_jobs_life(queue: Queue, record: Record) -> None:
    job_id = await submit(queue)
    await take(queue)
    last = await record.append(
        "w1",
        job_id,
        [
            Entry(kind="step", body={"step": 0, "tool": "python"}),
            Entry(kind="output", body={"stream": "stdout"}, data=b"hello \xff\x00"),
        ],
    )
    await queue.finish("w1", job_id, DONE)

    events = await record.events(job_id)

    kinds = ["submitted", "started", "step", "output", "finished"]
    assert [event.kind for event in events] == kinds
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]
    assert last == 4
    assert events[3].data == b"hello \xff\x00"
    assert events[4].body["state"] == "succeeded"
    assert [event.seq for event in await record.events(job_id, after=3, limit=1)] == [4]


async def test_a_log_can_be_read_from_any_byte(queue: Queue, record: Record) -> None:
    job_id = await submit(queue)
    await take(queue)
    whole = bytes(range(256)) * 4
    pieces = [whole[start : start + 100] for start in range(0, len(whole), 100)]
    for piece in pieces:
        await record.append("w1", job_id, [Entry(kind="step"), Entry(kind="output", data=piece)])

    assert await record.log_size(job_id) == len(whole)
    for offset in (0, 1, 99, 100, 101, 550, len(whole) - 1, len(whole), len(whole) + 5):
        for limit in (1, 7, 100, 250, 5000):
            found = await record.log(job_id, offset=offset, limit=limit)
            assert found == whole[offset : offset + limit], (offset, limit)


async def test_only_the_holder_may_write_history(queue: Queue, record: Record) -> None:
    job_id = await submit(queue)
    with pytest.raises(LeaseLost):
        await record.append("w1", job_id, [Entry(kind="step")])
    await take(queue, "w1")
    with pytest.raises(LeaseLost):
        await record.append("w2", job_id, [Entry(kind="step")])
    await queue.finish("w1", job_id, DONE)
    with pytest.raises(LeaseLost):
        await record.append("w1", job_id, [Entry(kind="step")])


async def test_a_deleted_job_takes_its_history_with_it(queue: Queue, record: Record) -> None:
    job_id = await submit(queue)
    await queue.cancel(job_id)
    assert [event.kind for event in await record.events(job_id)] == ["submitted", "finished"]

    await queue.delete(job_id)

    assert await record.events(job_id) == []


async def test_what_was_submitted_outlives_the_connection(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/jobs.db"
    first = await Database.open(address)
    job_id = await submit(Queue(first))
    await first.close()

    second = await Database.open(address)
    assert (await Queue(second).get(job_id)).state is State.QUEUED
    await second.close()


@pytest.mark.parametrize("address", ["nonsense", "mysql://h/d", "", "sqlite"])
async def test_an_address_of_no_known_database_is_a_bad_setting(address: str) -> None:
    with pytest.raises(BadSettings):
        await Database.open(address)


async def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        await Database.open(f"postgresql://nobody@/none?host={tmp_path}")


async def test_jobs_that_ended_long_ago_are_found_oldest_first(queue: Queue) -> None:
    ids = [await submit(queue) for _ in range(4)]
    await take(queue, limit=3)
    for job_id in ids[:2]:
        await queue.finish("w1", job_id, DONE)
    later = datetime.now(UTC) + HOUR

    assert await queue.over_before(later, limit=10) == ids[:2]
    assert await queue.over_before(later, limit=1) == ids[:1]
    assert await queue.over_before(later - 2 * HOUR, limit=10) == []


async def test_strangers_are_told_from_jobs(queue: Queue) -> None:
    job_id = await submit(queue)

    assert await queue.known([job_id, "0" * 16]) == {job_id}
    assert await queue.known([]) == set()


async def test_each_end_of_a_job_is_counted_once(database: Database) -> None:
    metrics = Metrics(version="0", rung="container")
    queue = Queue(database, meters=metrics)
    ends = {"done": "succeeded", "cancelled": "cancelled"}

    def finished(reason: str) -> float | None:
        labels = {"state": ends[reason], "reason": reason}
        return metrics.registry.get_sample_value("cloche_jobs_finished_total", labels)

    taken, waiting = await submit(queue), await submit(queue)
    assert await take(queue, limit=1) == [taken]
    await queue.release("w1", taken)
    await take(queue, limit=1)
    await queue.finish("w1", taken, DONE)
    with pytest.raises(LeaseLost):
        await queue.finish("w1", taken, DONE)
    await queue.cancel(waiting)
    await queue.cancel(waiting)

    assert (finished("done"), finished("cancelled")) == (1, 1)
    value = metrics.registry.get_sample_value
    assert value("cloche_job_wait_seconds_count") == 1, "taken up twice, but it waited once"
    assert value("cloche_job_run_seconds_count", {"state": "succeeded"}) == 1
    assert value("cloche_job_run_seconds_count", {"state": "cancelled"}) is None


async def test_the_history_tells_the_trace_a_job_is_part_of(
    database: Database, queue: Queue
) -> None:
    traced = await queue.submit("a", python(), traceparent="00-abc-def-01")
    untraced = await queue.submit("a", python())

    for job, body in ((traced.job, {"traceparent": "00-abc-def-01"}), (untraced.job, {})):
        assert [event.body for event in await Record(database).events(job.id)] == [body]


async def test_an_error_of_the_database_does_not_quote_what_was_stored(database: Database) -> None:
    secret = "a-secret-in-a-variable"
    statement = sa.text("INSERT INTO nowhere (a) VALUES (:value)")

    with pytest.raises((StoreUnavailable, sa.exc.DBAPIError)) as caught:
        await database.write(lambda connection: connection.execute(statement, {"value": secret}))

    assert secret not in "".join(traceback.format_exception(caught.value))
