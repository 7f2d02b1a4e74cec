"""Makes a backend, here or in another process, over the same data."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from cloche.core.machine import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """How to make the backend under test, in words that another process understands.

    A server that was killed and started again is another Backend object, in another
    process, over the data folder of the first: the checks must be able to make one.
    """

    factory: str
    """`package.module:callable`; it is called with the data folder alone."""
    data: Path

    def make(self) -> Backend:
        module, _, name = self.factory.partition(":")
        backend: Backend = getattr(importlib.import_module(module), name)(self.data)
        return backend
