"""Quotas, what is counted against them, and the sessions of browsers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from cloche.stores.tables import Moment

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_index("jobs_of_tenant_in_state", "jobs", ["tenant", "state"])
    op.create_index("uploads_of_tenant", "uploads", ["tenant", "size"])
    op.create_table(
        "quotas",
        sa.Column("tenant", sa.String(64), primary_key=True),
        sa.Column("overrides", sa.JSON, nullable=False),
    )
    op.create_table(
        "processor_time",
        sa.Column("tenant", sa.String(64), primary_key=True),
        sa.Column("day", sa.Date, primary_key=True),
        sa.Column("cpu_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "kept_artifacts",
        sa.Column(
            "job_id",
            sa.String(32),
            sa.ForeignKey("jobs.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
    )
    op.create_index("kept_artifacts_of_tenant", "kept_artifacts", ["tenant", "size"])
    op.create_table(
        "login_links",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("expires_at", Moment, nullable=False),
    )
    op.create_table(
        "browser_sessions",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("expires_at", Moment, nullable=False),
    )
