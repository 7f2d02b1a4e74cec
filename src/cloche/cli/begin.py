"""How every command that serves begins: its settings, its log, and a word that it is up."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from cloche import settings
from cloche.observe import logs

logger = logging.getLogger(__name__)


def prepare(data: Path | None) -> settings.Settings:
    """Read the settings and set the log up by them."""
    chosen = settings.load()
    logs.configure(chosen.log_format, chosen.log_level)
    if data is not None:
        chosen = chosen.model_copy(update={"data": data})
    return chosen


def say(chosen: settings.Settings, lines: list[str]) -> None:
    """Tell whoever started it that it is up, in the log's own form."""
    for line in lines:
        if chosen.log_format == "json":
            logger.info(line)
        else:
            sys.stderr.write(f"{line}\n")
