"""Going on with work, whatever comes in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, Final

from cloche.core.errors import StoreUnavailable

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0


async def attempt(what: str, work: Awaitable[None]) -> None:
    """Do a turn of a loop. What goes wrong is told and outlived, to be tried again in a moment:
    a server that takes work in and does none is worse than one that stumbles."""
    try:
        await work
    except StoreUnavailable as error:
        logger.warning("%s: %s Trying again.", what, error)
        await asyncio.sleep(RETRY_S)
    except Exception:
        logger.exception("%s: a fault of ours; trying again", what)
        await asyncio.sleep(RETRY_S)


async def see_to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if we are told to stop meanwhile; then stop."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
