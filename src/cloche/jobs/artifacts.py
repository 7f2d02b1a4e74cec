"""What a job leaves behind, as one zip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cloche.core.blobs import Blobs, artifacts_key
from cloche.sandbox import archives
from cloche.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was kept, and whether something had to be left out."""

    files: int
    bytes: int
    truncated: bool


async def keep(sandbox: Sandbox, patterns: Sequence[str], blobs: Blobs, job_id: str) -> Collected:
    """Zip what the patterns match below /workspace straight into `blobs`; no file, no zip.

    Raises:
        SandboxLost, GuestMisbehaved: the machine is gone, or lies; nothing was kept.
        StoreUnavailable: the zip cannot be kept.
    """
    plan = await archives.plan(sandbox, patterns)
    if plan.entries:
        await blobs.put(artifacts_key(job_id), archives.zipped(sandbox, plan))
    return Collected(files=plan.files, bytes=plan.bytes, truncated=plan.truncated)
