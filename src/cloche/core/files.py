"""What a machine's file calls answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One name in the machine's file system. Links are told of, not followed."""

    path: str
    kind: Literal["file", "folder", "link", "other"]
    size: int
    mode: int
    modified_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Names found, and whether there are more than one answer holds."""

    entries: tuple[FileEntry, ...]
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Paths that a pattern matched, and whether there are more."""

    paths: tuple[str, ...]
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One line that a search found."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """Lines that a search found, and whether there are more."""

    matches: tuple[Match, ...]
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something happened to a path. `overflow` means that some changes were missed."""

    kind: Literal["created", "changed", "removed", "overflow"]
    path: str
