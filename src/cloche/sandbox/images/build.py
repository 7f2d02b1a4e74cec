"""Runs the image's build script, watches its progress, and leaves nothing of it when it ends.

The script gets a mount and a PID namespace of its own. When its first process
dies, the kernel kills the rest and takes the mounts down, whoever did the
killing: a cancelled task, Ctrl-C, or `kill -9` of this very process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cloche.core.errors import ImageBuildFailed
from cloche.sandbox.images.recipe import Recipe

_STEP = re.compile(r"::step (\d+) (.+)")
_TAIL_LINES = 20
_TICK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a build is."""

    step: str
    fraction: float
    """Of the whole build, from 0 to 1. Never falls."""


class Meter:
    """Turns the steps a script announces, and the clock, into progress.

    Inside a step the fraction nears the step's end without reaching it, so that
    a slow network slows the bar down and never lets it stand still or run over.
    """

    def __init__(self, total_s: float, report: Callable[[Progress], None]) -> None:
        self._total_s = max(total_s, 1.0)
        self._report = report
        self._before_s = 0.0
        self._step_s = 0.0
        self._title = ""
        self._started = 0.0
        self._fraction = 0.0

    def read(self, line: str, now: float) -> None:
        """Take one line of the script's output."""
        match = _STEP.fullmatch(line)
        if match is None:
            return
        self._before_s += self._step_s
        self._step_s, self._title, self._started = float(match[1]), match[2], now
        self.tick(now)

    def tick(self, now: float) -> None:
        """Report how far the build should be by now."""
        share = 0.0
        if self._step_s > 0:
            share = 1 - math.exp(-1.5 * max(now - self._started, 0.0) / self._step_s)
        fraction = (self._before_s + self._step_s * share) / self._total_s
        self._fraction = min(max(fraction, self._fraction), 0.99)
        if self._title:
            self._report(Progress(step=self._title, fraction=self._fraction))


async def run(
    recipe: Recipe,
    *,
    root: Path,
    host: Path,
    environment: Mapping[str, str],
    log: Path,
    lock: int,
    report: Callable[[Progress], None],
) -> None:
    """Build `recipe` as the folder `root`.

    `lock` is a descriptor the build's processes inherit, so that a lock on it
    outlives this process for as long as any of them does.

    Raises:
        ImageBuildFailed: with the end of the log.
    """
    script = [str(recipe.folder / "build.sh"), str(root), recipe.suite, str(host)]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    meter = Meter(recipe.seconds(), report)
    # What a mirror answers may hold the password it was asked with.
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *_isolated(["bash", *script]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            pass_fds=(lock,),
            start_new_session=True,
            limit=1 << 20,
        )
        ticker = asyncio.create_task(_tick(meter))
        try:
            assert process.stdout is not None  # noqa: S101 - stdout=PIPE, for the type checker
            await _follow(process.stdout, sink, tail, meter)
            code = await process.wait()
        finally:
            ticker.cancel()
            await _end(process)
    if code != 0:
        raise ImageBuildFailed(
            "The machine image could not be built. The end of its log:\n" + "\n".join(tail),
            remedy=f"Read the whole log, {log}, then run `cloche image build` again.",
        )


def _isolated(argv: Sequence[str]) -> list[str]:
    return [
        *("setpriv", "--pdeathsig", "KILL", "--"),
        *("unshare", "--mount", "--propagation", "private"),
        *("--pid", "--fork", "--kill-child", "--mount-proc", "--"),
        *argv,
    ]


async def _follow(
    stream: asyncio.StreamReader, sink: BinaryIO, tail: deque[str], meter: Meter
) -> None:
    while raw := await stream.readline():
        sink.write(raw)
        sink.flush()
        line = raw.decode("utf-8", "replace").rstrip()
        meter.read(line, time.monotonic())
        if line and not _STEP.fullmatch(line):
            tail.append(line)


async def _tick(meter: Meter) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        meter.tick(time.monotonic())


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the build if it still runs, and return when every process of it is gone."""
    if process.returncode is not None:
        return
    # `unshare` waits for the namespace's first process, whose own end waits for
    # all others there. Killing `unshare` instead would return too early.
    for child in _children(process.pid) or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    await process.wait()


def _children(parent: int) -> list[int]:
    try:
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii")
    except OSError:
        return []
    return [int(child) for child in text.split()]
