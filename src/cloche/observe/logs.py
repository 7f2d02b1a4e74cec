"""The server's log on standard error: lines for people, or JSON for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from cloche.core import about, tracing

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]


def configure(form: Format, level: Level) -> None:
    """Send all that is logged in this process, by whomever, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        Json()
        if form == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(capture=True)
    if level == "debug":
        # Ours alone: the database's driver would tell every value it is given.
        logging.getLogger().setLevel(logging.INFO)
        logging.getLogger("cloche").setLevel(logging.DEBUG)
    # It tells of every plugin it loads.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It tells of every call, with the address: a webhook's may hold a secret.
    logging.getLogger("httpx").setLevel(logging.WARNING)


class Json(logging.Formatter):
    """One JSON object a line, with what the task that logs is at work on."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **about.facts(),
        }
        if trace_id := tracing.trace_id():
            line["trace_id"] = trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
