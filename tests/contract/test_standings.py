"""One set of checks for the store of sandboxes, on every database it runs on."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from cloche.core.errors import NoSuchSandbox
from cloche.core.rung import Rung
from cloche.core.spec import SandboxSpec
from cloche.core.standing import Condition, Ending, Standing
from cloche.stores.database import Database
from cloche.stores.standings import Standings

NOW = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@pytest.fixture
def standings(database: Database) -> Standings:
    return Standings(database)


def standing(number: int = 1, **values: object) -> Standing:
    whole = Standing(
        id=f"{number:012x}",
        tenant="a",
        home="here",
        rung=Rung.CONTAINER,
        spec=SandboxSpec(memory_mib=512),
        env={"NAME": "välue"},
        labels={"team": "blue"},
        created_at=NOW + timedelta(seconds=number),
        used_at=NOW,
        expires_at=NOW + timedelta(hours=1),
        idle_s=2.5,
    )
    return replace(whole, **values)


async def test_a_sandbox_is_found_as_it_was_added(standings: Standings) -> None:
    made = standing()
    await standings.add(made)

    assert await standings.get(made.id) == made
    assert await standings.get(made.id, tenant="a") == made
    for sandbox_id, tenant in (("0" * 12, None), (made.id, "b"), ("x" * 500, None)):
        with pytest.raises(NoSuchSandbox):
            await standings.get(sandbox_id, tenant=tenant)


async def test_adding_again_changes_nothing(standings: Standings) -> None:
    await standings.add(standing())
    await standings.end(standing().id, Ending.IDLE)

    await standings.add(standing(tenant="b"))

    found = await standings.get(standing().id)
    assert (found.tenant, found.condition) == ("a", Condition.ENDED)


async def test_lists_are_by_tenant_and_newest_first(standings: Standings) -> None:
    for number, tenant in ((1, "a"), (2, "b"), (3, "a"), (4, "a")):
        await standings.add(standing(number, tenant=tenant))
    await standings.end(standing(3).id, Ending.DELETED)

    async def ids(**options: object) -> list[int]:
        return [int(one.id, 16) for one in await standings.list(**options)]

    assert await ids(tenant="a") == [4, 1]
    assert await ids(tenant="a", ended=True) == [4, 3, 1]
    assert await ids(tenant=None) == [4, 2, 1]
    assert await ids(tenant=None, limit=1) == [4]
    assert (await standings.count("a"), await standings.count("c")) == (2, 0)


async def test_a_host_knows_its_own(standings: Standings) -> None:
    await standings.add(standing(1))
    await standings.add(standing(2, home="there"))
    await standings.add(standing(3))
    await standings.end(standing(3).id, Ending.LOST)

    assert [one.id for one in await standings.standing("here")] == [standing(1).id]


async def test_what_has_ended_stays_so(standings: Standings) -> None:
    made = standing()
    await standings.add(made)
    await standings.turn(made.id, Condition.PAUSED)
    await standings.extend(made.id, NOW + timedelta(days=1))
    await standings.touch({made.id: NOW + timedelta(minutes=1)})
    changed = await standings.get(made.id)
    assert changed.condition is Condition.PAUSED
    assert changed.expires_at == NOW + timedelta(days=1)
    assert changed.used_at == NOW + timedelta(minutes=1)

    await standings.end(made.id, Ending.EXPIRED)
    await standings.end(made.id, Ending.LOST)
    await standings.turn(made.id, Condition.RUNNING)
    await standings.extend(made.id, NOW)

    ended = await standings.get(made.id)
    assert (ended.condition, ended.ending) == (Condition.ENDED, Ending.EXPIRED)
    assert ended.expires_at == NOW + timedelta(days=1)
    assert ended.ended_at is not None


async def test_a_jobs_machine_is_found_by_the_job(standings: Standings) -> None:
    await standings.add(standing(1))
    await standings.add(standing(2, job="j" * 16))

    found = await standings.of_job("j" * 16)

    assert found is not None
    assert found.id == standing(2).id
    assert await standings.of_job("k" * 16) is None
