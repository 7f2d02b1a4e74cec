"""Keeps out of the guest's start what asyncio names but the guest does not use.

asyncio loads half the standard library: a log, a disassembler, a parser of Python,
most of it for messages about programming errors. That is two thirds of the time
a machine needs to answer. Each such module is replaced by a stand-in that has the
few constants asyncio asks for while it is loaded, and becomes the real one when
anything else is asked of it. So nothing is missing; it only comes later.
"""

from __future__ import annotations

import concurrent
import sys
from types import ModuleType

_CO_COROUTINE = 0x80
"""A flag of a code object, as `inspect` names it."""


class _Later(ModuleType):
    """A module that is loaded when something is asked of it that it does not have."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # The import system looks, and takes no for an answer.
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _real(name: str) -> ModuleType:
    if isinstance(sys.modules.get(name), _Later):
        del sys.modules[name]
    __import__(name)  # Waits for another thread that is at it already.
    return sys.modules[name]


class _Log:
    """asyncio's log, which is written to when something of ours goes wrong."""

    def debug(self, *_: object) -> None:
        """Say nothing: every loop tells here which selector it uses."""

    def __getattr__(self, name: str) -> object:
        return getattr(_real("logging").getLogger("asyncio"), name)


class _Form:
    """What an annotation is made with, and that nobody reads while the guest runs."""

    def __getitem__(self, _: object) -> _Form:
        return self

    def __call__(self, value: object, *_: object, **__: object) -> object:
        return value


def _extract_stack(*arguments: object) -> object:
    return _real("traceback").extract_stack(*arguments)


def _is_coroutine_function(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & _CO_COROUTINE)


def install() -> None:
    """Put the stand-ins in place. Before asyncio is loaded, or to no effect."""
    form, log = _Form(), _Log()
    waits = ("FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED")
    given: dict[str, dict[str, object]] = {
        "asyncio.sslproto": {},
        "concurrent.futures": {name: name for name in waits},
        "inspect": {"iscoroutinefunction": _is_coroutine_function},
        "logging": {"DEBUG": 10, "getLogger": lambda *_: log},
        "subprocess": {"PIPE": -1, "STDOUT": -2, "DEVNULL": -3},
        "traceback": {"extract_stack": _extract_stack},
        "typing": dict.fromkeys(("Any", "Optional", "Type", "TypeVar", "final"), form),
    }
    for name, words in given.items():
        sys.modules[name] = stand_in = _Later(name)
        stand_in.__dict__.update(words)
    # As the import system does it, which does not see that this one is there already.
    vars(concurrent)["futures"] = sys.modules["concurrent.futures"]
    # Not later, but never: the machine's channel does not speak it.
    sys.modules["ssl"] = None  # type: ignore[assignment]
