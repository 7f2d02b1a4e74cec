"""`cloche worker`: machines and jobs without an API."""

from __future__ import annotations

from pathlib import Path

from cloche.cli import begin
from cloche.work import Working, work


async def worker(data: Path | None) -> None:
    """Work until a signal says to stop."""
    chosen = begin.prepare(data)

    async def tell(working: Working) -> None:
        begin.say(chosen, _banner(working))

    await work(chosen, on_ready=tell)


def _banner(working: Working) -> list[str]:
    jobs = "1 job" if working.slots == 1 else f"up to {working.slots} jobs"
    return [
        f"Worker {working.name} runs {jobs} at once, on machines of the {working.rung} rung.",
        f"It takes them from {working.database}.",
        "Ctrl-C stops it; running jobs go on, and its next start takes them up.",
    ]
