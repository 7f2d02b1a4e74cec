"""What is to be told to receivers of webhooks, and the secret it is signed with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from cloche.stores.tables import Moment

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE")),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("receiver", sa.String(300), nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_at", Moment),
        sa.Column("next_at", Moment),
        sa.Column("last_error", sa.Text, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("lease_until", Moment),
    )
    op.create_index("deliveries_due", "deliveries", ["state", "next_at"])
    op.create_index("deliveries_of_job", "deliveries", ["job_id", "created_at"])
    op.create_table(
        "secrets",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
