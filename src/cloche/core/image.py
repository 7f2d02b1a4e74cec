"""The file system a machine starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One built recipe, as folders to be stacked read-only."""

    name: str
    digest: str
    """Hex SHA-256 of the recipe: equal digests hold equal software."""
    layers: tuple[Path, ...]
    """Top-most first."""
