"""Uploads in SQL: `cloche.core.uploads.Uploads`, on SQLite and PostgreSQL alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

import sqlalchemy as sa

from cloche.core.errors import NoSuchUpload
from cloche.core.quota import Quota
from cloche.core.uploads import Upload
from cloche.stores import quotas
from cloche.stores.database import Database, reads, writes
from cloche.stores.tables import uploads


class Uploads:
    """Uploads in the `uploads` table. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database, quota: Quota | None = None) -> None:
        self._database = database
        self._quota = quota or Quota()
        """What a tenant may have that has no quota of its own."""

    @reads
    def check_room(self, connection: sa.Connection, tenant: str, size: int) -> None:
        quotas.admit_upload(connection, tenant, size, self._quota)

    @writes
    def add(self, connection: sa.Connection, upload: Upload) -> None:
        quotas.lock(connection, upload.tenant)
        quotas.admit_upload(connection, upload.tenant, upload.size, self._quota)
        connection.execute(uploads.insert().values(asdict(upload)))

    @reads
    def get(self, connection: sa.Connection, upload_id: str, tenant: str | None = None) -> Upload:
        query = sa.select(uploads).where(_mine(upload_id, tenant))
        return _upload(connection.execute(query).one_or_none(), upload_id)

    @writes
    def delete(
        self, connection: sa.Connection, upload_id: str, tenant: str | None = None
    ) -> Upload:
        gone = uploads.delete().where(_mine(upload_id, tenant)).returning(*uploads.c)
        return _upload(connection.execute(gone).one_or_none(), upload_id)

    @reads
    def made_before(
        self, connection: sa.Connection, moment: datetime, *, limit: int
    ) -> Sequence[str]:
        query = (
            sa.select(uploads.c.id)
            .where(uploads.c.created_at < moment)
            .order_by(uploads.c.created_at)
            .limit(limit)
        )
        return connection.execute(query).scalars().all()

    @reads
    def known(self, connection: sa.Connection, upload_ids: Sequence[str]) -> set[str]:
        query = sa.select(uploads.c.id).where(uploads.c.id.in_(upload_ids))
        return set(connection.execute(query).scalars())


def _mine(upload_id: str, tenant: str | None) -> sa.ColumnElement[bool]:
    same = uploads.c.id == upload_id
    return same if tenant is None else same & (uploads.c.tenant == tenant)


def _upload(row: sa.Row[tuple[object, ...]] | None, upload_id: str) -> Upload:
    if row is None:
        raise NoSuchUpload(
            f"There is no upload {upload_id[:64]!r}.",
            remedy="Send the file to POST /v1/uploads; uploads are forgotten after some days.",
        )
    return Upload(**row._asdict())
