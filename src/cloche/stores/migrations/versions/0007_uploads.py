"""What is uploaded for jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from cloche.stores.tables import Moment

revision = "0007"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", Moment, nullable=False),
    )
    op.create_index("uploads_age", "uploads", ["created_at"])
    # What retention looks for.
    op.create_index("jobs_finished", "jobs", ["finished_at"])
