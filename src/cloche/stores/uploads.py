"""Uploads in SQL: `cloche.core.uploads.Uploads`, on SQLite and PostgreSQL alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

import sqlalchemy as sa

from cloche.core.errors import NoSuchUpload
from cloche.core.uploads import Upload
from cloche.stores.database import Database
from cloche.stores.tables import uploads


class Uploads:
    """Uploads in the `uploads` table. What each call does and raises is told at the protocol."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, upload: Upload) -> None:
        async with self._database.write() as connection:
            await connection.execute(uploads.insert().values(asdict(upload)))

    async def get(self, upload_id: str, tenant: str | None = None) -> Upload:
        query = sa.select(uploads).where(_mine(upload_id, tenant))
        async with self._database.read() as connection:
            return _upload((await connection.execute(query)).one_or_none(), upload_id)

    async def delete(self, upload_id: str, tenant: str | None = None) -> Upload:
        gone = uploads.delete().where(_mine(upload_id, tenant)).returning(*uploads.c)
        async with self._database.write() as connection:
            return _upload((await connection.execute(gone)).one_or_none(), upload_id)

    async def made_before(self, moment: datetime, *, limit: int) -> Sequence[str]:
        query = (
            sa.select(uploads.c.id)
            .where(uploads.c.created_at < moment)
            .order_by(uploads.c.created_at)
            .limit(limit)
        )
        async with self._database.read() as connection:
            return (await connection.execute(query)).scalars().all()

    async def known(self, upload_ids: Sequence[str]) -> set[str]:
        query = sa.select(uploads.c.id).where(uploads.c.id.in_(upload_ids))
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars())


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
