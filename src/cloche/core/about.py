"""What a task is at work on, so that whatever is logged meanwhile can say so."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_facts: ContextVar[Mapping[str, str]] = ContextVar("facts", default=_NOTHING)


def begin(**facts: str) -> None:
    """Begin on something new: forget what was noted, and note these.

    The running task knows them from here on, and so do the tasks it starts; no others.
    """
    _facts.set(facts)


def note(**facts: str) -> None:
    """Note more of what the running task is at work on."""
    _facts.set({**_facts.get(), **facts})


def facts() -> Mapping[str, str]:
    """Return what was noted: `request_id`, `tenant`, `job_id`, `machine`, as far as known."""
    return _facts.get()
