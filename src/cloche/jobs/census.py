"""Jobs by state, for whoever asks, at a bounded cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from cloche.core.errors import StoreUnavailable
from cloche.core.job import State
from cloche.core.queue import Queue

_REST: Final = 10
_PATIENCE_S: Final = 5.0


class Census:
    """Counts jobs, and rests ten times as long as counting took.

    Anyone may ask, as often as they like, and the more jobs there are the longer it
    takes: the database is at it a tenth of the time at most.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._alone = asyncio.Lock()
        self._counts: Mapping[State, int] = {}
        self._good_until = 0.0

    async def counts(self) -> Mapping[State, int]:
        """Count jobs by state.

        Raises:
            StoreUnavailable: the database does not answer, or not soon.
        """
        try:
            async with asyncio.timeout(_PATIENCE_S), self._alone:
                if (began := time.monotonic()) >= self._good_until:
                    self._counts = await self._queue.counts()
                    now = time.monotonic()
                    self._good_until = now + _REST * (now - began)
                return self._counts
        except TimeoutError:
            raise StoreUnavailable(
                f"The database did not answer within {_PATIENCE_S:g} s.",
                remedy="Check that it runs and is not overloaded.",
            ) from None
