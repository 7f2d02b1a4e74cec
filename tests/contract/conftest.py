"""What every backend and every store is tested with."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from cloche import settings
from cloche.core.errors import ImageMissing
from cloche.core.image import Image
from cloche.sandbox.images import Images
from cloche.stores.database import Database
from postgres import postgres


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        return Images(settings.load().data).find()
    except ImageMissing as error:
        pytest.skip(f"{error.message} {error.remedy}")


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with postgres() as address:
        yield address


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    if request.param == "sqlite":
        address = f"sqlite:///{tmp_path}/jobs.db"
    else:
        server = request.getfixturevalue("server")
        name = f"test_{secrets.token_hex(4)}"
        admin = create_async_engine(
            server.replace("postgresql:", "postgresql+asyncpg:"), isolation_level="AUTOCOMMIT"
        )
        async with admin.connect() as connection:
            await connection.execute(sa.text(f"CREATE DATABASE {name}"))
        await admin.dispose()
        address = server.replace("/postgres?", f"/{name}?")
    database = await Database.open(address)
    yield database
    await database.close()
