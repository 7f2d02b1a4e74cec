"""Keys, and the record of their use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from cloche.stores.tables import Moment

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("revoked_at", Moment),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", Moment, nullable=False),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(128), nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
    )
