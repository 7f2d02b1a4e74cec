"""Finds the machine's recipe and names it by its content.

The digest is an image's identity: a changed package list or lock is another
image, and a host that has the image of its recipe has nothing to build.
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from cloche.core.errors import OperatorError

SUITE = "trixie"
"""The Debian release machines are made of."""

_STEP = re.compile(r"^\s*step (\d+) ", re.MULTILINE)
_IGNORED = {".in", ".md"}
"""What locks are compiled from, and what only people read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The folder `image/`, for one processor architecture."""

    folder: Path
    suite: str = SUITE
    architecture: str = platform.machine()

    def files(self) -> list[Path]:
        """Return the files that decide what is in the image."""
        return sorted(
            path
            for path in self.folder.rglob("*")
            if path.is_file() and path.suffix not in _IGNORED and path.name != "lock.sh"
        )

    def digest(self) -> str:
        """Return the hex SHA-256 of the recipe."""
        total = hashlib.sha256(f"{self.suite}\0{self.architecture}\0".encode())
        for path in self.files():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(self.folder)}\0{content}\0".encode())
        return total.hexdigest()

    def seconds(self) -> int:
        """Return how long its scripts expect to take, by the steps they announce."""
        scripts = (self.folder / "build.sh", self.folder / "provision.sh")
        return sum(
            int(weight) for script in scripts for weight in _STEP.findall(script.read_text("utf-8"))
        )


def find_recipe() -> Recipe:
    """Return the recipe this copy of Cloche came with: package data, or the checkout's."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "image_recipe", package.parents[1] / "image"):
        if (folder / "provision.sh").is_file():
            return Recipe(folder=folder)
    raise OperatorError(
        "This copy of Cloche came without the recipe of its machine image.",
        remedy="Install Cloche again from a wheel or a full checkout.",
    )
