"""Keys in SQL: `cloche.core.access.Access`, on SQLite and PostgreSQL alike."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from cloche.core.access import AuditEntry, Caller, Key, Role
from cloche.core.errors import NoSuchKey
from cloche.stores.database import Database, reads, writes
from cloche.stores.tables import audit, keys

_SHAPE = re.compile(r"cloche_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class Access:
    """Keys in the `keys` table. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @writes
    def create_key(
        self, connection: sa.Connection, *, tenant: str, role: Role, name: str
    ) -> tuple[Key, str]:
        key = Key(
            id=secrets.token_hex(6),
            tenant=tenant,
            role=role,
            name=name,
            created_at=datetime.now(UTC),
        )
        secret = secrets.token_urlsafe(32)
        row = {
            "id": key.id,
            "hash": _hash(secret),
            "tenant": tenant,
            "role": role,
            "name": name,
            "created_at": key.created_at,
        }
        connection.execute(keys.insert().values(row))
        return key, f"cloche_{key.id}_{secret}"

    @reads
    def identify(self, connection: sa.Connection, secret: str) -> Caller | None:
        match = _SHAPE.fullmatch(secret)
        if match is None:
            return None
        query = sa.select(keys).where(keys.c.id == match[1], keys.c.revoked_at.is_(None))
        row = connection.execute(query).one_or_none()
        # A plain hash will do: the secret is 256 random bits, not a password.
        if row is None or not hmac.compare_digest(row.hash, _hash(match[2])):
            return None
        return Caller(key_id=row.id, tenant=row.tenant, role=Role(row.role))

    @reads
    def keys(self, connection: sa.Connection) -> Sequence[Key]:
        rows = connection.execute(sa.select(keys).order_by(keys.c.created_at))
        return [_key(row) for row in rows]

    @writes
    def revoke(self, connection: sa.Connection, key_id: str) -> Key:
        mine = keys.c.id == key_id
        connection.execute(
            keys.update()
            .where(mine, keys.c.revoked_at.is_(None))
            .values(revoked_at=datetime.now(UTC))
        )
        row = connection.execute(sa.select(keys).where(mine)).one_or_none()
        if row is None:
            raise NoSuchKey(f"There is no key {key_id!r}.", remedy="List the keys for their ids.")
        return _key(row)

    async def audit(self, caller: Caller, action: str, target: str, **detail: Any) -> None:
        await self._audit(caller, action, target, detail)

    @writes
    def _audit(
        self,
        connection: sa.Connection,
        caller: Caller,
        action: str,
        target: str,
        detail: Mapping[str, Any],
    ) -> None:
        add_audit(connection, caller, action, target, detail)

    @reads
    def audit_log(self, connection: sa.Connection, *, limit: int = 100) -> Sequence[AuditEntry]:
        query = sa.select(audit).order_by(audit.c.id.desc()).limit(limit)
        return [
            AuditEntry(
                at=row.at,
                key_id=row.key_id,
                tenant=row.tenant,
                action=row.action,
                target=row.target,
                detail=row.detail,
            )
            for row in connection.execute(query)
        ]


def add_audit(
    connection: sa.Connection,
    caller: Caller,
    action: str,
    target: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Note who does something, in the transaction that does it."""
    row = {
        "at": datetime.now(UTC),
        "key_id": caller.key_id,
        "tenant": caller.tenant,
        "action": action,
        "target": target,
        "detail": dict(detail or {}),
    }
    connection.execute(audit.insert().values(row))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _key(row: sa.Row[Any]) -> Key:
    return Key(
        id=row.id,
        tenant=row.tenant,
        role=Role(row.role),
        name=row.name,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )
