"""One set of checks for quotas, on every database they are kept in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from cloche.core.access import Role
from cloche.core.errors import ClocheError, LimitsOverQuota, QuotaExceeded
from cloche.core.job import Outcome, Reason, Request, State
from cloche.core.queue import Filter
from cloche.core.quota import Month, Quota, Usage
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.core.standing import Ending, Standing
from cloche.core.uploads import Upload
from cloche.stores.access import Access
from cloche.stores.database import Database
from cloche.stores.queue import Queue
from cloche.stores.quotas import Quotas
from cloche.stores.standings import Standings
from cloche.stores.tables import processor_time
from cloche.stores.uploads import Uploads

DONE = Outcome(state=State.SUCCEEDED, reason=Reason.DONE, exit_code=0)
MIB = 1 << 20


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database)


@pytest.fixture
def quotas(database: Database) -> Quotas:
    return Quotas(database, Quota())


def python(**options: object) -> Request:
    return Request.model_validate({"kind": "python", "code": "print(1)", **options})


async def finish(queue: Queue, tenant: str, **used: float) -> str:
    """Run a job of a tenant's to its end; return its id."""
    submitted = await queue.submit(tenant, python())
    await queue.acquire("w", lease=timedelta(hours=1), limit=100, per_tenant=100)
    await queue.finish("w", submitted.job.id, DONE, **used)  # type: ignore[arg-type]
    return submitted.job.id


async def count(queue: Queue, tenant: str) -> int:
    return len((await queue.list(tenant=tenant, where=Filter())).jobs)


async def test_of_many_submits_at_once_exactly_the_quota_is_accepted(
    queue: Queue, quotas: Quotas
) -> None:
    await quotas.override("a", {"jobs": 5})

    results = await asyncio.gather(
        *(queue.submit("a", python()) for _ in range(20)),
        *(queue.submit("b", python()) for _ in range(5)),
        return_exceptions=True,
    )

    refused = [result for result in results if isinstance(result, QuotaExceeded)]
    assert len(refused) == 15, results
    assert (refused[0].quota, refused[0].used, refused[0].limit) == ("jobs", 5, 5)
    assert (await count(queue, "a"), await count(queue, "b")) == (5, 5)


async def test_two_who_take_the_last_place_at_once_do_not_both_get_it(
    queue: Queue, quotas: Quotas
) -> None:
    await quotas.override("a", {"jobs": 1})
    for _ in range(10):
        pair = await asyncio.gather(
            queue.submit("a", python()), queue.submit("a", python()), return_exceptions=True
        )
        assert sum(isinstance(result, QuotaExceeded) for result in pair) == 1, pair
        (job,) = (result.job for result in pair if not isinstance(result, BaseException))
        await queue.cancel(job.id)


async def test_a_place_is_free_again_when_a_job_ends(queue: Queue, quotas: Quotas) -> None:
    await quotas.override("a", {"jobs": 1})
    await finish(queue, "a")
    await queue.submit("a", python())

    with pytest.raises(QuotaExceeded) as refused:
        await queue.submit("a", python())

    assert refused.value.retry_after_s is None, "nobody knows when one ends"


async def test_a_submit_that_repeats_one_needs_no_place(queue: Queue, quotas: Quotas) -> None:
    request = python(idempotency_key="k", limits={"vcpus": 4})
    first = await queue.submit("a", request)
    await quotas.override("a", {"jobs": 1, "max_vcpus": 1})

    again = await queue.submit("a", request)

    assert (again.created, again.job.id) == (False, first.job.id)


async def test_the_default_holds_for_tenants_without_a_quota_of_their_own(
    database: Database,
) -> None:
    queue, quotas = Queue(database, Quota(jobs=1)), Quotas(database, Quota(jobs=1))
    await quotas.override("rich", {"jobs": None})
    await queue.submit("poor", python())
    with pytest.raises(QuotaExceeded):
        await queue.submit("poor", python())
    for _ in range(3):
        await queue.submit("rich", python())

    await quotas.override("rich", {})

    assert await quotas.of("rich") == Quota(jobs=1)
    with pytest.raises(QuotaExceeded):
        await queue.submit("rich", python())


async def test_processor_time_is_counted_when_a_job_ends(queue: Queue, quotas: Quotas) -> None:
    await quotas.override("a", {"cpu_s": 3})
    await finish(queue, "a", cpu_s=1.25)
    await finish(queue, "a", cpu_s=1.5)
    assert (await quotas.usage("a")).cpu_s == 2.75

    await finish(queue, "a", cpu_s=1.0)

    with pytest.raises(QuotaExceeded) as refused:
        await queue.submit("a", python())
    assert (refused.value.quota, refused.value.used) == ("cpu_s", 3.75)
    assert 0 < (refused.value.retry_after_s or 0) <= 31 * 24 * 3600
    await queue.submit("b", python())


async def test_processor_time_is_not_counted_for_who_no_longer_holds_the_job(
    queue: Queue, quotas: Quotas
) -> None:
    job_id = await finish(queue, "a", cpu_s=1.0)

    with pytest.raises(ClocheError):
        await queue.finish("w", job_id, DONE, cpu_s=5.0)

    assert (await quotas.usage("a")).cpu_s == 1.0


@pytest.mark.parametrize("cpu_s", [float("nan"), float("inf"), -1.0, 0.0])
async def test_nonsense_is_not_counted(quotas: Quotas, cpu_s: float) -> None:
    await quotas.charge("a", cpu_s)

    assert (await quotas.usage("a")).cpu_s == 0


async def test_charges_at_once_all_count(quotas: Quotas) -> None:
    await asyncio.gather(*(quotas.charge("a", 0.5) for _ in range(20)))

    assert (await quotas.usage("a")).cpu_s == 10


async def test_last_months_processor_time_is_over(database: Database, quotas: Quotas) -> None:
    first = Month.of(datetime.now(UTC)).since.date()
    days = [(first, 1000), (first - timedelta(days=1), 5000)]
    rows = [{"tenant": "a", "day": day, "cpu_ms": cpu_ms} for day, cpu_ms in days]
    await database.write(lambda connection: connection.execute(processor_time.insert(), rows))

    assert (await quotas.usage("a")).cpu_s == 1


async def test_artifacts_are_held_until_their_job_is_deleted(queue: Queue, quotas: Quotas) -> None:
    await quotas.override("a", {"storage_mib": 2})
    job_id = await finish(queue, "a", kept_bytes=2 * MIB)
    with pytest.raises(QuotaExceeded) as refused:
        await queue.submit("a", python())
    assert (refused.value.quota, refused.value.used, refused.value.limit) == ("storage_mib", 2, 2)

    await queue.delete(job_id)

    assert (await quotas.usage("a")).storage_bytes == 0
    await queue.submit("a", python())


def upload(number: int, size: int) -> Upload:
    return Upload(
        id=f"{number:032x}", tenant="a", size=size, sha256="0" * 64, created_at=datetime.now(UTC)
    )


async def test_uploads_are_held_while_there_is_room(database: Database, quotas: Quotas) -> None:
    uploads = Uploads(database)
    await quotas.override("a", {"storage_mib": 1})
    await uploads.add(upload(1, MIB // 2))
    await uploads.add(upload(2, MIB // 2))
    with pytest.raises(QuotaExceeded):
        await uploads.add(upload(3, 1))
    with pytest.raises(QuotaExceeded):
        await uploads.check_room("a", 0)
    await uploads.check_room("b", MIB)
    assert (await quotas.usage("a")).storage_bytes == MIB, "a refusal changed something"

    await uploads.delete(upload(1, 0).id)

    await uploads.add(upload(3, 1))
    assert (await quotas.tenants())[0].usage.storage_bytes == MIB // 2 + 1


async def test_of_many_uploads_at_once_no_more_are_held_than_there_is_room(
    database: Database, quotas: Quotas
) -> None:
    uploads = Uploads(database)
    await quotas.override("a", {"storage_mib": 1})

    results = await asyncio.gather(
        *(uploads.add(upload(number, MIB // 4)) for number in range(12)), return_exceptions=True
    )

    assert sum(result is None for result in results) == 4, results


async def test_a_machine_larger_than_the_quota_is_refused_and_nothing_stored(
    queue: Queue, quotas: Quotas
) -> None:
    await quotas.override("a", {"max_memory_mib": 1024})

    with pytest.raises(LimitsOverQuota, match="1024"):
        await queue.submit("a", python())

    assert await count(queue, "a") == 0
    await queue.submit("a", python(limits={"memory_mib": 1024}))


def sandbox(number: int, **values: object) -> Standing:
    now = datetime.now(UTC)
    whole = Standing(
        id=f"{number:012x}",
        tenant="a",
        home="here",
        rung=Rung.CONTAINER,
        spec=SandboxSpec(),
        created_at=now,
        used_at=now,
        expires_at=now + timedelta(hours=1),
    )
    return replace(whole, **values)


async def test_of_many_sandboxes_at_once_exactly_the_quota_is_accepted(
    database: Database, quotas: Quotas
) -> None:
    standings = Standings(database)
    await quotas.override("a", {"sandboxes": 5})

    results = await asyncio.gather(
        *(standings.add(sandbox(number)) for number in range(20)), return_exceptions=True
    )

    assert sum(isinstance(result, QuotaExceeded) for result in results) == 15, results
    assert (await quotas.usage("a")).sandboxes == 5
    with pytest.raises(QuotaExceeded):
        await standings.check_room("a", SandboxSpec())
    await standings.check_room("b", SandboxSpec())


async def test_a_place_is_free_again_when_a_sandbox_ends(
    database: Database, quotas: Quotas
) -> None:
    standings = Standings(database)
    await quotas.override("a", {"sandboxes": 1})
    await standings.add(sandbox(1))
    await standings.add(sandbox(1))
    with pytest.raises(QuotaExceeded):
        await standings.add(sandbox(2))

    await standings.end(sandbox(1).id, Ending.DELETED)

    await standings.add(sandbox(2))


async def test_the_kept_machine_of_a_job_counts_but_is_not_refused(
    database: Database, quotas: Quotas
) -> None:
    standings = Standings(database)
    await quotas.override("a", {"sandboxes": 1})

    for number in range(3):
        await standings.add(sandbox(number, job="j" * 16))

    assert (await quotas.usage("a")).sandboxes == 3
    with pytest.raises(QuotaExceeded):
        await standings.add(sandbox(4))


async def test_a_sandbox_is_refused_for_its_size_and_for_spent_processor_time(
    database: Database, quotas: Quotas
) -> None:
    standings = Standings(database)
    await quotas.override("a", {"max_vcpus": 1, "cpu_s": 5})
    small = SandboxSpec(vcpus=1)
    with pytest.raises(LimitsOverQuota):
        await standings.add(sandbox(1))
    await standings.add(sandbox(2, spec=small))

    await quotas.charge("a", 5)

    with pytest.raises(QuotaExceeded, match="CPU"):
        await standings.add(sandbox(3, spec=small))


async def test_tenants_are_all_who_left_a_trace(
    database: Database, queue: Queue, quotas: Quotas
) -> None:
    access = Access(database)
    await access.create_key(tenant="keyed", role=Role.MEMBER, name="")
    key, _ = await access.create_key(tenant="keyed", role=Role.MEMBER, name="")
    await access.revoke(key.id)
    await queue.submit("busy", python())
    await quotas.override("bounded", {"jobs": 7})
    await finish(queue, "spent", cpu_s=2.0, kept_bytes=10)

    found = {tenant.name: tenant for tenant in await quotas.tenants()}

    assert sorted(found) == ["bounded", "busy", "keyed", "spent"]
    assert found["keyed"].keys == 1
    assert found["busy"].usage == Usage(jobs=1)
    assert found["bounded"].overrides == {"jobs": 7}
    assert found["spent"].usage == Usage(cpu_s=2.0, storage_bytes=10)
