"""The database's tables. Migrations bring a database to this shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()


class Moment(sa.types.TypeDecorator[datetime]):
    """A point in time as microseconds since the epoch: exact, and compares alike everywhere."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> int | None:
        return None if value is None else round(value.timestamp() * 1_000_000)

    def process_result_value(self, value: int | None, dialect: Any) -> datetime | None:
        return None if value is None else datetime.fromtimestamp(value / 1_000_000, tz=UTC)


jobs = sa.Table(
    "jobs",
    metadata,
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
    sa.Column("attempt", sa.Integer, nullable=False, default=0),
    sa.Column("reason", sa.String(32)),
    sa.Column("exit_code", sa.Integer),
    sa.Column("error", sa.Text, nullable=False, default=""),
    sa.Column("cancel_requested", sa.Boolean, nullable=False, default=False),
    sa.Column("worker", sa.String(64), nullable=False, default=""),
    sa.Column("lease_until", Moment),
    sa.Column("machine", sa.String(64), nullable=False, default=""),
    sa.Column("rung", sa.String(16)),
    sa.UniqueConstraint("tenant", "idempotency_key"),
    # What `acquire` looks for.
    sa.Index("jobs_queue", "state", "priority", "created_at"),
    sa.Index("jobs_of_tenant", "tenant", "created_at", "id"),
    sa.Index("jobs_lease", "lease_until"),
    sa.Index("jobs_finished", "finished_at"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column(
        "job_id", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    ),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", Moment, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("body", sa.JSON, nullable=False),
    sa.Column("data", sa.LargeBinary),
    # The job's log is its output events' data in a row: where this one's begins and ends.
    sa.Column("log_from", sa.BigInteger),
    sa.Column("log_to", sa.BigInteger),
    sa.Index("events_log", "job_id", "log_to"),
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("created_at", Moment, nullable=False),
    sa.Column("revoked_at", Moment),
)

uploads = sa.Table(
    "uploads",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("created_at", Moment, nullable=False),
    sa.Index("uploads_age", "created_at"),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", Moment, nullable=False),
    sa.Column("key_id", sa.String(16), nullable=False),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("target", sa.String(128), nullable=False),
    sa.Column("detail", sa.JSON, nullable=False),
)

sandboxes = sa.Table(
    "sandboxes",
    metadata,
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
    sa.Index("sandboxes_of_tenant", "tenant", "condition", "created_at"),
    sa.Index("sandboxes_of_home", "home", "condition"),
    sa.Index("sandboxes_of_job", "job"),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE")),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    # Its host and port: what a slow one is bounded by.
    sa.Column("receiver", sa.String(300), nullable=False),
    sa.Column("event", sa.String(16), nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("created_at", Moment, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("last_at", Moment),
    sa.Column("next_at", Moment),
    sa.Column("last_error", sa.Text, nullable=False, default=""),
    sa.Column("owner", sa.String(64), nullable=False, default=""),
    sa.Column("lease_until", Moment),
    sa.Index("deliveries_due", "state", "next_at"),
    sa.Index("deliveries_of_job", "job_id", "created_at"),
)

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
