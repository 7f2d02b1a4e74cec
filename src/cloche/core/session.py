"""How a browser is let in: by a link that works once, and then by a cookie."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Protocol

from cloche.core.access import Role

LINK_LIFE: Final = timedelta(minutes=10)
SESSION_LIFE: Final = timedelta(hours=12)
"""Since its last use."""
SESSION_AT_MOST: Final = timedelta(days=7)
"""Since it was opened, however much it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What lets one browser in, once."""

    token: str
    role: Role
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A browser that was let in, on behalf of a key."""

    key_id: str
    tenant: str
    role: Role
    expires_at: datetime


class Sessions(Protocol):
    """Links and sessions. They end with their key. Every call may raise `StoreUnavailable`."""

    async def link(self, *, key_id: str, tenant: str, role: Role) -> Link:
        """Make a link; its token is returned this once."""
        ...

    async def open(self, token: str) -> tuple[str, Session] | None:
        """Use up a link and return a session's secret; None when it was used, or is too old."""
        ...

    async def identify(self, secret: str) -> Session | None:
        """Return whose session this is, and let it last on; None when it has ended."""
        ...

    async def close(self, secret: str) -> None:
        """End a session. Idempotent."""
        ...
