"""The files of a machine."""

from __future__ import annotations

from typing import Any, Final, Literal

from cloche.api.described import Answer, example

_ENTRY: Final[dict[str, Any]] = {
    "path": "/workspace/hello.txt",
    "kind": "file",
    "size": 6,
    "mode": 420,
    "modified_at": 1772442904.51,
}
CHANGE_STREAM: Final = 'event: created\ndata: {"path": "/workspace/hello.txt"}\n\n'


class FileEntry(Answer):
    """What is at a path. A link is told of, not followed."""

    model_config = example(_ENTRY)

    path: str
    kind: Literal["file", "folder", "link", "other"]
    size: int
    mode: int
    modified_at: float
    """Seconds since the epoch, by the machine's clock."""


class FileListing(Answer):
    """What is in a folder."""

    model_config = example({"entries": [_ENTRY], "truncated": False})

    entries: list[FileEntry]
    truncated: bool
    """There is more than one answer holds."""


class FilePaths(Answer):
    """Paths that a pattern matched."""

    model_config = example({"paths": ["/workspace/app/main.py"], "truncated": False})

    paths: list[str]
    truncated: bool


class FileMatch(Answer):
    """One line that a search found."""

    path: str
    line: int
    text: str


class FileMatches(Answer):
    """Lines that a search found."""

    model_config = example(
        {
            "matches": [{"path": "/workspace/app/main.py", "line": 12, "text": "def main():"}],
            "truncated": False,
        }
    )

    matches: list[FileMatch]
    truncated: bool
