"""What a job leaves behind, as one zip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloche.sandbox import archives
from cloche.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was kept, and whether something had to be left out."""

    files: int
    bytes: int
    truncated: bool


async def collect(sandbox: Sandbox, patterns: Sequence[str], target: Path) -> Collected:
    """Zip what the patterns match below /workspace into `target`; no file, no zip.

    Raises:
        SandboxLost, GuestMisbehaved: the machine is gone, or lies.
    """
    plan = await archives.plan(sandbox, patterns)
    if plan.entries:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_suffix(".part")
        try:
            with draft.open("wb") as sink:
                async for data in archives.zipped(sandbox, plan):
                    await asyncio.to_thread(sink.write, data)
            draft.rename(target)
        finally:
            draft.unlink(missing_ok=True)
    return Collected(files=plan.files, bytes=plan.bytes, truncated=plan.truncated)
