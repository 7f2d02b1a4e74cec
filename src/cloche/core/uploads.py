"""Files sent ahead of the jobs that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What is known of an upload. Its bytes are a blob, under `upload_key(id)`."""

    id: str
    tenant: str
    size: int
    sha256: str
    created_at: datetime


class Uploads(Protocol):
    """Whose upload is whose. Every call may raise `StoreUnavailable`."""

    async def add(self, upload: Upload) -> None:
        """Note an upload whose bytes are kept."""
        ...

    async def get(self, upload_id: str, tenant: str | None = None) -> Upload:
        """Return an upload; with `tenant`, only one of that tenant's.

        Raises:
            NoSuchUpload: there is none.
        """
        ...

    async def delete(self, upload_id: str, tenant: str | None = None) -> Upload:
        """Forget an upload; return what it was.

        Raises:
            NoSuchUpload: there is none.
        """
        ...

    async def made_before(self, moment: datetime, *, limit: int) -> Sequence[str]:
        """Return uploads from before that moment, the oldest first."""
        ...

    async def known(self, upload_ids: Sequence[str]) -> set[str]:
        """Return those of the ids that are an upload's."""
        ...
