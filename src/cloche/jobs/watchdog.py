"""Ends what goes on without use: a step that is silent or greedy, a job past its time.

A machine keeps its own time, and ends a command by itself; but it runs code that nobody
trusts, and may be made to stall. So every wait for a machine is bounded here, by the
host's clock and by what the host counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Final

from cloche.core.errors import GuestMisbehaved, NoSuchProcess, SandboxLost
from cloche.core.job import Limits, Outcome, Reason, State
from cloche.core.process import Exit
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox

GRACE_S: Final = 1.0
"""How much later than its own deadline a guest may report a command that it ended."""
KILL_S: Final = 3.0
"""How long it may take to kill a step and to read what it wrote last."""
COLLECT_S: Final = 4.0
"""How long after a job's time its artifacts may still be collected."""
POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the operator allows every job at most, whatever it asks for."""

    silent_s: float | None = None
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A bound that a step has passed."""

    reason: Reason
    error: str
    """A sentence for people."""

    def outcome(self, ended: Exit | None = None) -> Outcome:
        code = None if ended is None else ended.code
        return Outcome(state=State.FAILED, reason=self.reason, exit_code=code, error=self.error)


def out_of_time(limits: Limits) -> Breach:
    return Breach(reason=Reason.TIMEOUT, error=f"The job did not end within {limits.wall_s:g} s.")


class Watchdog:
    """Watches one job on one machine."""

    def __init__(
        self,
        sandbox: Sandbox,
        limits: Limits,
        ceilings: Ceilings,
        *,
        began: float,
        cpu_before: float,
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._ends_at = began + limits.wall_s
        self._silent_s = _stricter(limits.silent_s, ceilings.silent_s)
        self._cpu_s = _stricter(limits.cpu_s, ceilings.cpu_s)
        self._cpu_before = cpu_before
        self._heard_at = time.time()

    @property
    def left_s(self) -> float:
        """How much of the job's time is left."""
        return self._ends_at - time.time()

    def heard(self, at: float | None = None) -> None:
        """Take note that the step wrote something, or began: now, or at some time before."""
        self._heard_at = time.time() if at is None else at

    def in_time(self) -> asyncio.Timeout:
        """Bound a call to the machine by the time that is left to the job."""
        return asyncio.timeout(max(0.0, self.left_s) + GRACE_S)

    async def watch(self, following: asyncio.Task[Exit], step: int) -> Breach | None:
        """Wait until a step ends, or is to be ended; say why."""
        while not following.done():
            if (breach := await self._look(step)) is not None:
                return breach
            await asyncio.wait((following,), timeout=self._nap_s())
        return None

    async def _look(self, step: int) -> Breach | None:
        now = time.time()
        if now >= self._ends_at + GRACE_S:
            return out_of_time(self._limits)
        if self._silent_s is not None and now >= self._heard_at + self._silent_s:
            told = f"Step {step + 1} wrote nothing for {self._silent_s:g} s."
            return Breach(reason=Reason.SILENT, error=told)
        if self._cpu_s is not None:
            used_s = (await self._sandbox.usage()).cpu_s - self._cpu_before
            if used_s >= self._cpu_s:
                told = f"The job used more than {self._cpu_s:g} s of processor time."
                return Breach(reason=Reason.CPU, error=told)
        return None

    def _nap_s(self) -> float:
        now = time.time()
        naps = [self._ends_at + GRACE_S - now]
        if self._silent_s is not None:
            naps.append(self._heard_at + self._silent_s - now)
        if self._cpu_s is not None:
            naps.append(POLL_S)
        return max(0.01, min(naps))


async def end(process: Process, following: asyncio.Task[Exit]) -> Exit | None:
    """Kill a step and all it started; return how it ended, or None when the machine stalls.

    Then it is ended with its machine, which nothing outlives.
    """
    with contextlib.suppress(TimeoutError, SandboxLost, GuestMisbehaved, NoSuchProcess):
        async with asyncio.timeout(KILL_S):
            await process.kill()
            return await asyncio.shield(following)
    return None


async def collect(
    outcome: Outcome, collecting: Awaitable[None], limits: Limits, began: float
) -> Outcome:
    """Keep what a job leaves, if the machine hands it over in time; return how the job ended.

    Raises:
        SandboxLost, GuestMisbehaved: the machine of a job that went well until then.
    """
    left_s = max(0.0, began + limits.wall_s - time.time())
    try:
        async with asyncio.timeout(left_s + COLLECT_S):
            await collecting
    except TimeoutError:
        if outcome.state is State.SUCCEEDED:
            outcome = out_of_time(limits).outcome()
        return replace(outcome, error=f"{outcome.error} What it left could not be kept in time.")
    except (SandboxLost, GuestMisbehaved):
        if outcome.state is State.SUCCEEDED:
            raise
    return outcome


def _stricter(first: float | None, second: float | None) -> float | None:
    return min((bound for bound in (first, second) if bound is not None), default=None)
