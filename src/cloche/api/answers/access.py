"""Keys, who uses them, and for what."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from cloche.api.described import Answer, example
from cloche.core.access import Role

KEY_ID: Final = "c4b1a7e02d9f"
_AT: Final = "2026-03-02T09:15:04.120518+00:00"
_KEY: Final[dict[str, Any]] = {
    "id": KEY_ID,
    "tenant": "acme",
    "role": "member",
    "name": "ci",
    "created_at": _AT,
    "revoked_at": None,
}


class Key(Answer):
    """What is known of a key; the key itself is not."""

    model_config = example({**_KEY, "revoked_at": "2026-03-09T17:00:00.000000+00:00"})

    id: str
    tenant: str
    role: Role
    name: str
    created_at: datetime
    revoked_at: datetime | None


class CreatedKey(Key):
    """A key, with its secret: told this once."""

    model_config = example({**_KEY, "key": f"cloche_{KEY_ID}_EXAMPLE"})

    key: str


class Keys(Answer):
    """Every key."""

    model_config = example({"keys": [_KEY]})

    keys: list[Key]


class AuditEntry(Answer):
    """Who did what, and when."""

    at: datetime
    key_id: str
    tenant: str
    action: str
    target: str
    detail: dict[str, Any]


class Audit(Answer):
    """Who did what, newest first."""

    model_config = example(
        {
            "entries": [
                {
                    "at": _AT,
                    "key_id": "env:5e884898da28",
                    "tenant": "default",
                    "action": "key.create",
                    "target": KEY_ID,
                    "detail": {"tenant": "acme", "role": "member"},
                }
            ]
        }
    )

    entries: list[AuditEntry]


class LoginLink(Answer):
    """A link that lets one browser in, once."""

    model_config = example(
        {
            "url": "http://127.0.0.1:8000/login?token=EXAMPLE",
            "path": "/login?token=EXAMPLE",
            "role": "member",
            "expires_at": "2026-03-02T09:25:04.120518+00:00",
        }
    )

    url: str
    path: str
    role: Role
    expires_at: datetime


class Session(Answer):
    """A browser's stay."""

    expires_at: datetime


class WhoAmI(Answer):
    """Whom the server takes the caller for."""

    model_config = example({"key_id": KEY_ID, "tenant": "acme", "role": "member", "session": None})

    key_id: str
    tenant: str
    role: Role
    session: Session | None
    """Null for a caller that sent a key."""
