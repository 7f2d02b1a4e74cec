"""Threads for calls that block.

What `concurrent.futures` does, without what it loads: a third of the guest's start.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Up to `most` threads, started as they are needed, that `prepare` themselves first."""

    def __init__(self, most: int, prepare: Callable[[], None]) -> None:
        self._most = most
        self._prepare = prepare
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    def run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Call `function` on one of the threads, in turn."""
        order = _Order(function, arguments)
        self._busy += 1
        order.future.add_done_callback(self._done)
        if self._busy > self._started < self._most:
            self._start()
        self._orders.put(order)
        return order.future

    def _done(self, _: asyncio.Future[Any]) -> None:
        self._busy -= 1

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="blocking", daemon=True).start()
        except RuntimeError:  # No process left to be had: those that are there must do.
            if not self._started:
                raise
        else:
            self._started += 1

    def _work(self) -> None:
        trouble = None
        try:
            self._prepare()
        except Exception as error:
            trouble = RuntimeError(f"a thread is not what it should be: {error}")
        while True:
            self._orders.get().carry_out(trouble)


class _Order:
    """One call, and where its result is waited for."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._loop = asyncio.get_running_loop()
        self._function = function
        self._arguments = arguments
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def carry_out(self, trouble: BaseException | None) -> None:
        """Call, unless the thread is in trouble or nobody waits any more."""
        if self.future.cancelled():
            return
        result = None
        try:
            if trouble is not None:
                raise trouble
            result = self._function(*self._arguments)
        except BaseException as error:
            trouble = error
        self._loop.call_soon_threadsafe(self._settle, result, trouble)

    def _settle(self, result: object, trouble: BaseException | None) -> None:
        if self.future.done():  # Cancelled meanwhile.
            return
        if trouble is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(trouble)
