"""`cloche serve`: the API and a worker, in one process."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from cloche import settings
from cloche.serve import Running
from cloche.serve import serve as run_server


async def serve(host: str, port: int, data: Path | None) -> None:
    """Serve until a signal says to stop."""
    await run_server(prepare(data), host=host, port=port, on_ready=_banner)


def prepare(data: Path | None) -> settings.Settings:
    """Set the log up and read the settings."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # It tells of every plugin it loads.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It tells of every call, with the address: a webhook's may hold a secret.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    chosen = settings.load()
    if data is not None:
        chosen = chosen.model_copy(update={"data": data})
    return chosen


async def _banner(running: Running) -> None:
    lines = [f"Cloche is at {running.url}, giving machines of the {running.rung} rung."]
    if running.key_file is not None:
        lines.append(f"The first API key is in {running.key_file}.")
    sys.stderr.write("\n".join(lines) + "\n")
