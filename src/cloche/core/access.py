"""Who may do what."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

ENVIRONMENT: Final = "env:"
"""How the ids of keys begin that are not in the database, but in a server's environment."""


class Role(enum.StrEnum):
    """What a key opens. Each role may do all that the ones below it may."""

    ADMIN = "admin"
    MEMBER = "member"
    READ_ONLY = "read-only"

    def at_least(self, minimum: Role) -> bool:
        ladder = list(Role)
        return ladder.index(self) <= ladder.index(minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever makes a request."""

    key_id: str
    tenant: str
    role: Role
    session_until: datetime | None = None
    """When the session ends, if it is a browser that was let in by a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is known of a key. The key itself is not: only its hash is kept."""

    id: str
    tenant: str
    role: Role
    name: str
    created_at: datetime
    revoked_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Who did what, and when."""

    at: datetime
    key_id: str
    tenant: str
    action: str
    target: str
    detail: Mapping[str, Any]


class Access(Protocol):
    """Keys, and the record of their use. Every call may raise `StoreUnavailable`."""

    async def create_key(self, *, tenant: str, role: Role, name: str) -> tuple[Key, str]:
        """Make a key; its secret is returned this once."""
        ...

    async def identify(self, secret: str) -> Caller | None:
        """Return whose key this is, or None when it is nobody's or was revoked."""
        ...

    async def keys(self) -> Sequence[Key]: ...

    async def revoke(self, key_id: str) -> Key:
        """Make a key useless from now on. Idempotent.

        Raises:
            NoSuchKey: there is none.
        """
        ...

    async def audit(self, caller: Caller, action: str, target: str, **detail: Any) -> None:
        """Note that someone did something."""
        ...

    async def audit_log(self, *, limit: int = 100) -> Sequence[AuditEntry]:
        """Return the latest entries, newest first."""
        ...
