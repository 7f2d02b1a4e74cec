"""Sandboxes without a job: made, used, and ended when their time is up.

Their machines outlive the server like those of jobs. Which there are is in the
store; what happens to one in memory alone is how many calls use it right now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cloche.core.errors import (
    ClocheError,
    MachinePaused,
    NoSuchMachine,
    NoSuchSandbox,
    SandboxElsewhere,
    SandboxLost,
)
from cloche.core.job import Job
from cloche.core.machine import Usage
from cloche.core.queue import Queue
from cloche.core.standing import Condition, Ending, Order, Standing, Standings
from cloche.jobs.machines import Machines
from cloche.jobs.persistence import attempt, see_to_its_end
from cloche.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
_NOTE_S: Final = 5.0
"""How often uses are written down: a restart may take a sandbox for this much more idle."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A sandbox that a call has in hand."""

    sandbox: Sandbox
    env: dict[str, str]


class Sandboxes:
    """The sandboxes of this host, and the way into the machines of its jobs."""

    def __init__(self, standings: Standings, queue: Queue, machines: Machines, *, home: str):
        self._standings = standings
        self._queue = queue
        self._machines = machines
        self._home = home
        self._in_use: Counter[str] = Counter()
        self._used: dict[str, datetime] = {}
        self._noted = 0.0
        self.standing = 0
        """How many there were when last looked at."""

    async def create(self, tenant: str, order: Order) -> Standing:
        """Make a sandbox; when this returns, it stands until its time is up.

        Raises:
            RungUnavailable, ImageMissing, BackendUnavailable, MachineNotStarted:
                there is no machine to be had.
            QuotaExceeded, LimitsOverQuota: the tenant may have no such sandbox.
        """
        await self._standings.check_room(tenant, order.spec())
        sandbox = await self._machines.claim(order.spec(), order.min_rung)
        now = datetime.now(UTC)
        standing = Standing(
            id=sandbox.id,
            tenant=tenant,
            home=self._home,
            rung=sandbox.rung,
            spec=sandbox.spec,
            env=order.env,
            labels=order.labels,
            created_at=now,
            used_at=now,
            expires_at=now + timedelta(seconds=order.ttl_s),
            idle_s=order.idle_s,
        )
        try:
            await self._standings.add(standing)
        except BaseException:
            await see_to_its_end(sandbox.close())
            raise
        return standing

    async def keep(self, job: Job, sandbox: Sandbox) -> None:
        """Let the machine of a job that ends stand on as a sandbox. Idempotent."""
        now = datetime.now(UTC)
        await self._standings.add(
            Standing(
                id=sandbox.id,
                tenant=job.tenant,
                home=self._home,
                rung=sandbox.rung,
                spec=sandbox.spec,
                env=job.request.env,
                labels=job.request.labels,
                created_at=now,
                used_at=now,
                expires_at=now + timedelta(seconds=job.request.keep_alive_s),
                job=job.id,
            )
        )

    async def keeps(self, job_id: str) -> bool:
        """Tell whether a job's machine stands on."""
        return await self._standings.of_job(job_id) is not None

    @contextlib.asynccontextmanager
    async def use(self, sandbox_id: str, tenant: str | None) -> AsyncIterator[Opened]:
        """Have a sandbox in hand: while this lasts, it is not idle.

        Raises:
            NoSuchSandbox: there is none, or its machine is gone.
            SandboxElsewhere: it is on another host.
            MachinePaused: it has to be resumed first.
        """
        standing = await self._standings.get(sandbox_id, tenant=tenant)
        async with self._in_hand(standing) as opened:
            yield opened

    @contextlib.asynccontextmanager
    async def use_of_job(self, job_id: str, tenant: str | None) -> AsyncIterator[Opened]:
        """Have a job's machine in hand, while it runs or is kept.

        Raises:
            NoSuchJob: there is no such job.
            NoSuchSandbox: it has no machine yet, or no more.
            SandboxElsewhere: it is on another host.
        """
        job = await self._queue.get(job_id, tenant=tenant)
        standing = await self._standings.of_job(job_id)
        if standing is not None:
            async with self._in_hand(standing) as opened:
                yield opened
            return
        if job.state.final or not job.machine:
            when = "no more" if job.state.final else "yet"
            raise NoSuchSandbox(
                f"Job {job_id} is {job.state} and has no machine {when}.",
                remedy="Read its artifacts, or submit it with keep_alive_s."
                if job.state.final
                else "Try again once it runs.",
            )
        if job.worker not in ("", self._home):
            raise _elsewhere(job.worker)
        yield Opened(await self._adopt(job.machine), dict(job.request.env))

    @contextlib.asynccontextmanager
    async def _in_hand(self, standing: Standing) -> AsyncIterator[Opened]:
        sandbox = await self._open(standing)
        if sandbox.machine.paused:
            raise MachinePaused(
                f"Sandbox {standing.id} is paused.", remedy="Resume it, then try again."
            )
        self._in_use[standing.id] += 1
        try:
            yield Opened(sandbox, dict(standing.env))
        finally:
            self._in_use[standing.id] -= 1
            self._in_use += Counter()  # Forget what nobody uses.
            self._used[standing.id] = datetime.now(UTC)

    async def _open(self, standing: Standing) -> Sandbox:
        if standing.condition is Condition.ENDED:
            raise NoSuchSandbox(
                f"Sandbox {standing.id} has ended: {standing.ending}.", remedy="Make a new one."
            )
        if standing.home != self._home:
            raise _elsewhere(standing.home)
        try:
            return await self._adopt(standing.id)
        except NoSuchSandbox:
            await self._standings.end(standing.id, Ending.LOST)
            raise

    async def _adopt(self, machine_id: str) -> Sandbox:
        try:
            return await self._machines.adopt(machine_id)
        except NoSuchMachine as error:
            raise NoSuchSandbox(
                f"The machine {machine_id} is gone.", remedy="Make a new sandbox."
            ) from error

    async def usage(self, sandbox_id: str, tenant: str | None) -> Usage:
        """Count what a sandbox has used, without using it. Raises as `use`, but for pausing."""
        standing = await self._standings.get(sandbox_id, tenant=tenant)
        return await (await self._open(standing)).usage()

    async def pause(self, sandbox_id: str, tenant: str | None) -> Standing:
        """Stop every process where it stands. Idempotent. Raises as `use`."""
        standing = await self._standings.get(sandbox_id, tenant=tenant)
        await (await self._open(standing)).pause()
        await self._standings.turn(sandbox_id, Condition.PAUSED)
        return await self._standings.get(sandbox_id)

    async def resume(self, sandbox_id: str, tenant: str | None) -> Standing:
        """Undo `pause`. Idempotent. Raises as `use`."""
        standing = await self._standings.get(sandbox_id, tenant=tenant)
        await (await self._open(standing)).resume()
        self._used[sandbox_id] = datetime.now(UTC)
        await self._standings.turn(sandbox_id, Condition.RUNNING)
        return await self._standings.get(sandbox_id)

    async def extend(self, sandbox_id: str, tenant: str | None, ttl_s: float) -> Standing:
        """Let a sandbox stand for `ttl_s` from now.

        Raises:
            NoSuchSandbox: there is none, or it has ended.
        """
        standing = await self._standings.get(sandbox_id, tenant=tenant)
        if standing.condition is not Condition.ENDED:
            until = datetime.now(UTC) + timedelta(seconds=ttl_s)
            await self._standings.extend(sandbox_id, until)
            standing = await self._standings.get(sandbox_id)
        if standing.condition is Condition.ENDED:
            raise NoSuchSandbox(
                f"Sandbox {sandbox_id} has ended: {standing.ending}.", remedy="Make a new one."
            )
        return standing

    async def delete(self, sandbox_id: str, tenant: str | None) -> None:
        """Destroy a sandbox; one on another host goes within moments. Idempotent.

        Raises:
            NoSuchSandbox: there never was one.
        """
        standing = await self._standings.get(sandbox_id, tenant=tenant)
        if standing.condition is Condition.ENDED:
            return
        if standing.home != self._home:
            await self._standings.extend(sandbox_id, datetime.now(UTC))
            return
        await see_to_its_end(self._end(standing, Ending.DELETED))

    async def run(self) -> None:
        """End what is over, as long as the server runs; the sandboxes themselves stand on."""
        while True:
            await attempt("sandboxes", self._look())
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        await self._note_uses()
        standings = await self._standings.standing(self._home)
        self.standing = len(standings)
        for standing in standings:
            if ending := await self._ending(standing):
                try:
                    await see_to_its_end(self._end(standing, ending))
                except ClocheError as error:  # The others' time is up all the same.
                    logger.warning("sandbox %s: %s", standing.id, error)

    async def _note_uses(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._used and now - self._noted >= _NOTE_S:
            used, self._used, self._noted = self._used, {}, now
            await self._standings.touch(used)

    async def _ending(self, standing: Standing) -> Ending | None:
        now = datetime.now(UTC)
        if standing.expires_at <= now:
            return Ending.EXPIRED
        idle_since = self._used.get(standing.id, standing.used_at)
        if (
            standing.idle_s is not None
            and standing.condition is Condition.RUNNING
            and not self._in_use[standing.id]
            and idle_since + timedelta(seconds=standing.idle_s) <= now
        ):
            return Ending.IDLE
        try:
            await self._machines.adopt(standing.id)
        except NoSuchMachine:
            return Ending.LOST
        return None

    async def _end(self, standing: Standing, ending: Ending) -> None:
        # Said before it is done: whoever finds the machine half gone is not to call it lost.
        # A machine that nobody says stands is swept when the server starts.
        await self._standings.end(standing.id, ending)
        with contextlib.suppress(NoSuchMachine, SandboxLost):
            await (await self._machines.adopt(standing.id)).close()
        self._used.pop(standing.id, None)
        logger.info("sandbox %s ended: %s", standing.id, ending)


def _elsewhere(home: str) -> SandboxElsewhere:
    return SandboxElsewhere(
        f"The machine is on the host of {home}, and cannot be reached from here.",
        remedy="Send the request to the server that runs there.",
    )
