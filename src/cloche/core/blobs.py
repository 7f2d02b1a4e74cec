"""Where large things are kept: what jobs leave behind, and what is uploaded for them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO, Protocol

JOBS = "jobs/"
UPLOADS = "uploads/"
_ID = re.compile(r"[0-9a-f]{8,64}")


def artifacts_key(job_id: str) -> str:
    """Where a job's zip is kept."""
    return f"{JOBS}{_checked(job_id)}/artifacts.zip"


def upload_key(upload_id: str) -> str:
    """Where an upload is kept."""
    return f"{UPLOADS}{_checked(upload_id)}"


def owner_of(key: str) -> str | None:
    """Return the id of the job or upload that a key belongs to; None for a key not of ours."""
    for prefix in (JOBS, UPLOADS):
        if key.startswith(prefix):
            owner = key.removeprefix(prefix).partition("/")[0]
            return owner if _ID.fullmatch(owner) else None
    return None


def _checked(name: str) -> str:
    # Ids are ours, made of random hex: anything else in a key is a mistake of ours.
    if not _ID.fullmatch(name):
        raise ValueError(f"{name!r} is not an id")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One thing that is kept, as it was when it was looked at."""

    key: str
    size: int
    modified_at: datetime
    tag: str | None
    """Changes when the content does, where the store can tell."""


class Blobs(Protocol):
    """Bytes under keys. Every call may raise `StoreUnavailable`: the store cannot be reached."""

    async def put(self, key: str, pieces: AsyncIterable[bytes]) -> None:
        """Keep what `pieces` yields, in bounded memory; whole on return, in place of the last.

        Whatever `pieces` raises is passed on. Then, and when cancelled, nothing was kept.
        """
        ...

    async def find(self, key: str) -> Blob | None:
        """Look for a blob; None when there is none."""
        ...

    def read(self, blob: Blob, start: int = 0, stop: int | None = None) -> AsyncIterator[bytes]:
        """Yield a blob's bytes from `start` up to, not including, `stop`, piece by piece.

        Raises:
            NoSuchFile: it was deleted meanwhile.
        """
        ...

    def open(self, blob: Blob) -> BinaryIO:
        """Open a blob for seeking and reading. It blocks: use it in a thread.

        Reading raises what `read` does.
        """
        ...

    def list(self, prefix: str) -> AsyncIterator[Blob]:
        """Yield every blob whose key starts with `prefix`, which ends with a slash."""
        ...

    async def delete(self, key: str) -> None:
        """Forget a blob. Idempotent."""
        ...

    async def sweep(self, before: datetime) -> int:
        """Remove what puts that died before that moment left; return how many bytes went.

        Object stores hide that, and clean it up by rules of their own.
        """
        ...
