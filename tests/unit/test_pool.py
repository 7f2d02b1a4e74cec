"""The warm pool, over backends and machines that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche.core.errors import BadSettings, MachineNotDestroyed, MachineNotStarted
from cloche.core.image import Image
from cloche.core.machine import Backend, Machine
from cloche.core.spec import SandboxSpec
from cloche.sandbox import client
from cloche.sandbox.pool import Pool
from cloche.testing.fakes import (
    DeafMachine,
    DyingMachine,
    FailingBackend,
    IdleBackend,
    IdleMachine,
    LyingMachine,
    SlowBackend,
    SlowMachine,
    StubbornMachine,
    answer,
)

IMAGE = Image(name="base", digest="0" * 64, layers=(Path("/nowhere"),))


@contextlib.asynccontextmanager
async def running(backend: IdleBackend, *, size: int) -> AsyncIterator[Pool]:
    pool = Pool(backend, SandboxSpec(), IMAGE, size=size)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def filled(pool: Pool) -> None:
    async with asyncio.timeout(5):
        await pool.filled()


async def test_a_pool_fills_to_its_size_and_no_further() -> None:
    backend = IdleBackend()
    async with running(backend, size=3) as pool:
        await filled(pool)
        await asyncio.sleep(0.05)

        assert (pool.ready, len(backend.machines)) == (3, 3)


async def test_a_claim_takes_a_warm_machine_and_another_takes_its_place() -> None:
    backend = SlowBackend(delay_s=0.1)
    async with running(backend, size=1) as pool:
        await filled(pool)
        began = time.monotonic()

        sandbox = await pool.claim()

        assert time.monotonic() - began < 0.09, "it was not warm"
        assert sandbox.id == backend.machines[0].id
        await filled(pool)
        assert len(backend.machines) == 2
        await sandbox.close()


async def test_a_claim_from_an_empty_pool_starts_a_machine() -> None:
    backend = IdleBackend()
    async with running(backend, size=0) as pool:
        sandbox = await pool.claim()

        assert [machine.id for machine in backend.machines] == [sandbox.id]
        await sandbox.close()


async def test_no_machine_is_given_out_twice() -> None:
    backend = SlowBackend(lambda spec: SlowMachine(spec, delay_s=0.005), delay_s=0.005)
    async with running(backend, size=4) as pool:
        await filled(pool)

        sandboxes = await asyncio.gather(*(pool.claim() for _ in range(40)))

        assert len({sandbox.id for sandbox in sandboxes}) == 40
        for sandbox in sandboxes:
            await sandbox.close()
    assert backend.left == []


async def test_a_machine_that_died_in_the_pool_is_not_given_out() -> None:
    backend = IdleBackend(lambda spec: DyingMachine(spec, calls_left=2))
    async with running(backend, size=1) as pool:
        await filled(pool)
        dead = backend.machines[0]
        assert isinstance(dead, DyingMachine)
        dead.calls_left = -1

        sandbox = await pool.claim()

        assert sandbox.id != dead.id
        assert dead.destroyed, "what is left of it is taken away"
        await sandbox.close()


async def test_a_dead_machine_that_cannot_be_removed_does_not_stand_in_the_way() -> None:
    class Corpse(StubbornMachine, DyingMachine):
        pass

    backend = IdleBackend(Corpse)
    pool = Pool(backend, SandboxSpec(), IMAGE, size=1)
    backend.kind = IdleMachine
    pool.start()
    await filled(pool)
    corpse = Corpse(SandboxSpec())
    corpse.calls_left = -1
    warm = pool._warm[0]
    warm.machine = corpse

    sandbox = await pool.claim()

    assert sandbox.id != corpse.id
    await sandbox.close()
    await pool.close()


async def test_a_failed_start_is_tried_again() -> None:
    backend = FailingBackend(failures=1)
    async with running(backend, size=1) as pool:
        await filled(pool)

        assert pool.ready == 1


async def test_a_failed_start_is_not_tried_again_at_once() -> None:
    backend = FailingBackend(failures=1000)
    async with running(backend, size=1):
        await asyncio.sleep(0.2)

        assert backend.failures >= 998, "it hammers a host that cannot start machines"


async def test_a_claim_tells_why_no_machine_starts() -> None:
    async with running(FailingBackend(failures=1000), size=1) as pool:
        with pytest.raises(MachineNotStarted):
            await pool.claim()


@pytest.mark.parametrize(
    "says",
    [b"", b"SSH-2.0-OpenSSH\r\n", answer({"protocol": 2, "uptime_s": 0}), answer([])],
)
async def test_a_machine_whose_guest_lies_never_enters_the_pool(says: bytes) -> None:
    backend = IdleBackend(lambda spec: LyingMachine(spec, says=says))
    async with running(backend, size=1) as pool:
        while not backend.machines:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)

        assert pool.ready == 0
    assert backend.left == []


async def test_a_machine_whose_guest_is_deaf_never_enters_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    backend = IdleBackend(DeafMachine)
    async with running(backend, size=1) as pool:
        while backend.left != [] or not backend.machines:
            await asyncio.sleep(0.01)

        assert pool.ready == 0


async def test_a_machine_that_dies_while_it_warms_up_never_enters_the_pool() -> None:
    backend = IdleBackend(lambda spec: DyingMachine(spec, calls_left=1))
    async with running(backend, size=1) as pool:
        while not backend.machines:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)

        assert pool.ready == 0
    assert backend.left == []


async def test_closing_destroys_what_nobody_claimed_and_nothing_else() -> None:
    backend = IdleBackend()
    async with running(backend, size=3) as pool:
        await filled(pool)
        claimed = await pool.claim()

    assert backend.left == [claimed.id]
    await claimed.close()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.11, 0.13, 0.16, 0.19])
async def test_closing_leaves_nothing_of_a_start_under_way(after_s: float) -> None:
    backend = SlowBackend(lambda spec: SlowMachine(spec, delay_s=0.02), delay_s=0.1)
    pool = Pool(backend, SandboxSpec(), IMAGE, size=3)
    pool.start()
    await asyncio.sleep(after_s)

    await pool.close()

    assert backend.left == []


async def test_a_pool_may_be_closed_twice_or_unused() -> None:
    pool = Pool(IdleBackend(), SandboxSpec(), IMAGE, size=2)
    await pool.close()
    pool.start()
    await pool.close()
    await pool.close()

    assert pool.ready == 0


async def test_one_machine_that_will_not_die_does_not_save_the_others() -> None:
    backend = IdleBackend(lambda spec: StubbornMachine(spec, tries=1))
    pool = Pool(backend, SandboxSpec(), IMAGE, size=3)
    pool.start()
    await filled(pool)
    first = backend.machines[0]
    assert isinstance(first, StubbornMachine)
    first.tries = 2

    with pytest.raises(MachineNotDestroyed):
        await pool.close()

    assert backend.left == [first.id]


async def test_a_claim_that_is_cancelled_loses_no_machine() -> None:
    backend = IdleBackend(lambda spec: SlowMachine(spec, delay_s=0.05))
    async with running(backend, size=1) as pool:
        await filled(pool)
        task = asyncio.create_task(pool.claim())
        await asyncio.sleep(0.01)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert backend.left == []


def test_a_pool_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(BadSettings, match="-1"):
        Pool(IdleBackend(), SandboxSpec(), IMAGE, size=-1)


def test_the_fakes_are_what_they_stand_for() -> None:
    """Checked by mypy more than by the run: they implement the protocols."""
    machine: Machine = IdleMachine()
    backend: Backend = IdleBackend()

    assert machine.rung is backend.rung
