"""Cloche runs coding agents, and the code they write, under glass.

    async with cloche.Sandbox.create() as sandbox:
        result = await sandbox.exec(["echo", "hello"], timeout_s=10)

Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloche.app import Sandbox as Sandbox
    from cloche.core.errors import ClocheError as ClocheError
    from cloche.core.process import ExecResult as ExecResult

__version__ = "0.1.0"
__all__ = ["ClocheError", "ExecResult", "Sandbox", "__version__"]

_HOMES = {
    "Sandbox": "cloche.app",
    "ClocheError": "cloche.core.errors",
    "ExecResult": "cloche.core.process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cloche' has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(_HOMES[name]), name)
