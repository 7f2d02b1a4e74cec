"""`cloche serve`: the API and a worker, in one process."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from cloche import settings
from cloche.observe import logs
from cloche.serve import Running
from cloche.serve import serve as run_server

logger = logging.getLogger(__name__)


async def serve(host: str, port: int, data: Path | None) -> None:
    """Serve until a signal says to stop."""
    chosen = prepare(data)

    async def tell(running: Running) -> None:
        for line in _banner(running):
            if chosen.log_format == "json":
                logger.info(line)
            else:
                sys.stderr.write(f"{line}\n")

    await run_server(chosen, host=host, port=port, on_ready=tell)


def prepare(data: Path | None) -> settings.Settings:
    """Read the settings and set the log up by them."""
    chosen = settings.load()
    logs.configure(chosen.log_format, chosen.log_level)
    if data is not None:
        chosen = chosen.model_copy(update={"data": data})
    return chosen


def _banner(running: Running) -> list[str]:
    lines = [f"Cloche is at {running.url}, giving machines of the {running.rung} rung."]
    if running.key_file is not None:
        lines.append(f"The first API key is in {running.key_file}.")
    return lines
