"""One set of checks for the outbox of webhooks, on every database it runs on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from cloche.core.errors import LeaseLost
from cloche.core.job import Outcome, Reason, Request, State
from cloche.core.outbox import Attempt, Delivery, Fate
from cloche.stores.database import Database
from cloche.stores.outbox import Outbox
from cloche.stores.queue import Queue

MINUTE = timedelta(minutes=1)
EXPIRED = timedelta(seconds=-1)
URL = "https://hooks.example/in"
BOTH = ["started", "finished"]
DONE = Outcome(state=State.SUCCEEDED, reason=Reason.DONE, exit_code=0)


class Desk:
    """A queue and its outbox on one database."""

    def __init__(self, database: Database) -> None:
        self.queue = Queue(database)
        self.outbox = Outbox(database)

    async def submit(self, tenant: str = "a", url: str = URL, **options: object) -> str:
        webhook = {"url": url, **options}
        code = {"kind": "python", "code": "SECRET", "env": {"TOKEN": "SECRET"}}
        request = Request.model_validate({**code, "labels": {"team": "x"}, "webhook": webhook})
        return (await self.queue.submit(tenant, request)).job.id

    async def take(self) -> None:
        await self.queue.acquire("w", lease=MINUTE, limit=1000, per_tenant=1000)

    async def over(self, tenant: str = "a", url: str = URL) -> str:
        """Run a job to its end."""
        job_id = await self.submit(tenant, url)
        await self.take()
        await self.queue.finish("w", job_id, DONE)
        return job_id

    async def claim(
        self,
        owner: str = "s1",
        *,
        lease: timedelta = MINUTE,
        limit: int = 100,
        per_receiver: int = 100,
        per_tenant: int = 100,
    ) -> Sequence[Delivery]:
        return await self.outbox.claim(
            owner, lease=lease, limit=limit, per_receiver=per_receiver, per_tenant=per_tenant
        )


@pytest.fixture
def desk(database: Database) -> Desk:
    return Desk(database)


def now() -> datetime:
    return datetime.now(UTC)


def heard() -> Attempt:
    return Attempt(at=now(), state=Fate.DELIVERED)


async def test_the_end_of_a_job_is_told_without_its_code(desk: Desk) -> None:
    job_id = await desk.over()

    (delivery,) = await desk.claim()

    body = json.loads(delivery.body)
    assert (delivery.job_id, delivery.url, delivery.event) == (job_id, URL, "finished")
    assert (body["id"], body["type"]) == (delivery.id, "job.finished")
    assert (body["job"]["id"], body["job"]["state"]) == (job_id, "succeeded")
    assert body["job"]["request"]["labels"] == {"team": "x"}
    assert "SECRET" not in delivery.body


async def test_a_start_is_told_when_asked_for_and_only_once(desk: Desk) -> None:
    job_id = await desk.submit(events=BOTH)
    await desk.take()
    await desk.queue.release("w", job_id)
    await desk.take()
    await desk.queue.finish("w", job_id, DONE)

    deliveries = await desk.outbox.of_job(job_id)

    assert [delivery.event for delivery in deliveries] == BOTH
    states = [json.loads(delivery.body)["job"]["state"] for delivery in deliveries]
    assert states == ["running", "succeeded"], "each tells the job as it was then"


async def test_a_job_that_is_cancelled_in_the_queue_is_told_of(desk: Desk) -> None:
    job_id = await desk.submit(events=BOTH)
    await desk.queue.cancel(job_id)
    await desk.queue.cancel(job_id)

    (delivery,) = await desk.outbox.of_job(job_id)

    assert json.loads(delivery.body)["job"]["state"] == "cancelled"


async def test_nothing_is_told_of_a_change_that_did_not_happen(desk: Desk) -> None:
    job_id = await desk.submit()
    await desk.take()

    with pytest.raises(LeaseLost):
        await desk.queue.finish("another", job_id, DONE)

    assert await desk.outbox.of_job(job_id) == []


async def test_a_job_without_a_webhook_tells_nobody(desk: Desk) -> None:
    request = Request.model_validate({"kind": "shell", "code": "true"})
    job_id = (await desk.queue.submit("a", request)).job.id
    await desk.take()
    await desk.queue.finish("w", job_id, DONE)

    assert await desk.outbox.of_job(job_id) == []


async def test_what_one_server_sends_no_other_does(desk: Desk) -> None:
    wanted = {await desk.over(tenant=f"t{number % 3}") for number in range(30)}
    taken: list[str] = []

    async def send(owner: str) -> None:
        idle = 0
        while idle < 3:
            batch = await desk.claim(owner, limit=4)
            taken.extend(delivery.job_id for delivery in batch)
            idle = 0 if batch else idle + 1

    await asyncio.gather(*(send(f"s{number}") for number in range(6)))

    assert len(taken) == len(set(taken))
    assert set(taken) == wanted


async def test_what_was_heard_is_not_sent_again(desk: Desk) -> None:
    job_id = await desk.over()
    (delivery,) = await desk.claim()

    await desk.outbox.settle("s1", delivery.id, heard())

    assert await desk.claim(lease=EXPIRED) == []
    (settled,) = await desk.outbox.of_job(job_id)
    assert (settled.state, settled.attempts, settled.next_at) == (Fate.DELIVERED, 1, None)
    assert settled.last_at is not None


async def test_a_try_that_failed_is_made_again_when_it_is_due(desk: Desk) -> None:
    job_id = await desk.over()
    for wait, error in ((EXPIRED, "answered 500"), (MINUTE, "refused")):
        (delivery,) = await desk.claim()
        again = Attempt(at=now(), state=Fate.PENDING, next_at=now() + wait, error=error)
        await desk.outbox.settle("s1", delivery.id, again)

    assert await desk.claim() == []
    (waiting,) = await desk.outbox.of_job(job_id)
    assert (waiting.state, waiting.attempts, waiting.last_error) == (Fate.PENDING, 2, "refused")


async def test_what_a_dead_server_held_is_sent_by_another(desk: Desk) -> None:
    await desk.over()
    (held,) = await desk.claim("dead", lease=EXPIRED)

    (taken,) = await desk.claim("next")
    await desk.outbox.settle("dead", held.id, heard())

    assert taken.id == held.id
    (still,) = await desk.outbox.of_job(held.job_id)
    assert (still.state, still.attempts) == (Fate.PENDING, 0), "it was no longer the dead one's"


async def test_a_restarted_server_sends_at_once_what_it_held(desk: Desk) -> None:
    await desk.over()
    (held,) = await desk.claim("s1")
    assert await desk.claim("s1") == []

    await desk.outbox.reclaim("s1")

    assert [delivery.id for delivery in await desk.claim("s1")] == [held.id]


async def test_a_receiver_has_no_more_than_its_share(desk: Desk) -> None:
    for number in range(6):
        await desk.over(url=f"https://slow.example/{number}")
    quick = await desk.over(url="https://quick.example/")

    first = await desk.claim(per_receiver=2)
    second = await desk.claim("s2", per_receiver=2)

    assert sorted(delivery.receiver for delivery in first) == [
        "quick.example:443",
        *["slow.example:443"] * 2,
    ]
    assert quick in {delivery.job_id for delivery in first}
    assert second == []
    await desk.outbox.settle("s1", first[0].id, heard())
    assert len(await desk.claim("s2", per_receiver=2)) == 1


async def test_a_tenant_has_no_more_than_its_share_however_many_names_it_uses(desk: Desk) -> None:
    for number in range(6):
        await desk.over("loud", url=f"https://{number}.example/")
    quiet = await desk.over("quiet")

    taken = await desk.claim(limit=3, per_receiver=1, per_tenant=2)

    assert [delivery.tenant for delivery in taken].count("loud") == 2
    assert quiet in {delivery.job_id for delivery in taken}


async def test_a_deleted_job_takes_its_deliveries_with_it(desk: Desk) -> None:
    job_id = await desk.over()

    await desk.queue.delete(job_id)

    assert await desk.claim() == []


async def test_all_servers_sign_with_one_secret(desk: Desk, database: Database) -> None:
    offered = [f"whsec_{number}" for number in range(8)]

    found = await asyncio.gather(*(Outbox(database).secret(secret) for secret in offered))

    assert len(set(found)) == 1
    assert await desk.outbox.secret("whsec_late") == found[0]
