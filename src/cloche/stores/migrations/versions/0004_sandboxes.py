"""Sandboxes that stand without a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from cloche.stores.tables import Moment

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("home", sa.String(64), nullable=False),
        sa.Column("rung", sa.String(16), nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("condition", sa.String(16), nullable=False),
        sa.Column("ending", sa.String(16)),
        sa.Column("env", sa.JSON, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("created_at", Moment, nullable=False),
        sa.Column("used_at", Moment, nullable=False),
        sa.Column("expires_at", Moment, nullable=False),
        sa.Column("ended_at", Moment),
        sa.Column("idle_s", sa.Float),
        sa.Column("job", sa.String(32), nullable=False),
    )
    op.create_index("sandboxes_of_tenant", "sandboxes", ["tenant", "condition", "created_at"])
    op.create_index("sandboxes_of_home", "sandboxes", ["home", "condition"])
    op.create_index("sandboxes_of_job", "sandboxes", ["job"])
