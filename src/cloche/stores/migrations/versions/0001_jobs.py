"""The queue of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from cloche.stores.tables import Moment

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("idempotency_key", sa.String(256)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("started_at", Moment),
        sa.Column("finished_at", Moment),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("reason", sa.String(32)),
        sa.Column("exit_code", sa.Integer),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("worker", sa.String(64), nullable=False),
        sa.Column("lease_until", Moment),
        sa.Column("machine", sa.String(64), nullable=False),
        sa.Column("rung", sa.String(16)),
        sa.UniqueConstraint("tenant", "idempotency_key"),
    )
    op.create_index("jobs_queue", "jobs", ["state", "priority", "created_at"])
    op.create_index("jobs_of_tenant", "jobs", ["tenant", "created_at", "id"])
    op.create_index("jobs_lease", "jobs", ["lease_until"])
