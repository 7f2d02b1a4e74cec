"""Blocking calls of the guest, on threads of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cloche.guest.threads import Threads


def ready() -> None:
    threading.current_thread().name = "prepared"


async def test_calls_run_on_prepared_threads_and_no_more_than_allowed() -> None:
    threads = Threads(3, ready)
    together = threading.Barrier(3)

    def call(_: int) -> tuple[str, int]:
        together.wait(5)
        return threading.current_thread().name, threading.get_ident()

    results = await asyncio.gather(*(threads.run(call, number) for number in range(9)))

    assert {name for name, _ in results} == {"prepared"}
    assert len({number for _, number in results}) == 3


async def test_calls_in_turn_need_one_thread() -> None:
    threads = Threads(4, ready)

    assert len({await threads.run(threading.get_ident) for _ in range(9)}) == 1


async def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(FileNotFoundError):
        await Threads(1, ready).run(open, "/nowhere")


async def test_a_thread_that_cannot_be_prepared_calls_nothing() -> None:
    def refuse() -> None:
        raise PermissionError("cannot become the user")

    called: list[int] = []
    threads = Threads(1, refuse)
    for number in range(3):
        with pytest.raises(RuntimeError, match="cannot become the user"):
            await threads.run(called.append, number)

    assert called == []


async def test_a_call_that_nobody_waits_for_any_more_is_not_begun() -> None:
    threads = Threads(1, ready)
    go_on = threading.Event()
    called: list[int] = []
    first = threads.run(go_on.wait, 5)
    second = threads.run(called.append, 2)
    third = threads.run(called.append, 3)

    second.cancel()
    go_on.set()
    await asyncio.gather(first, third)

    assert called == [3]
