"""What the guest may say. Anything else is an attack, and is refused as a whole.

Strict types and explicit bounds on every field: the machine on the other side
runs code that nobody has vouched for.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cloche.core.errors import GuestMisbehaved, ReplyTooLarge
from cloche.core.files import Change, FileEntry, Listing, Match, Matches, Paths
from cloche.core.process import Exit, ProcessStatus

PROTOCOL = 1
_HUGE = 2**62
_PARTS = 250_000
"""Values in one message. A parsed `[]` takes 60 times its two bytes and a comma."""

Count = Annotated[int, Field(ge=0, le=_HUGE)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False, strict=False)]
Path = Annotated[str, Field(max_length=16384)]


class Wire(BaseModel):
    """A message from the guest."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Hello(Wire):
    """The guest's greeting."""

    protocol: Literal[1]
    uptime_s: Seconds


class Refused(Wire):
    """Why a call was not carried out."""

    code: Annotated[str, Field(max_length=64)]
    message: Annotated[str, Field(max_length=65536)]


class Done(Wire):
    """A call was carried out, and there is nothing to tell."""


class ExitLine(Wire):
    """How a process ended."""

    code: Annotated[int, Field(ge=0, le=255)]
    signal: Annotated[int, Field(ge=1, le=64)] | None
    timed_out: bool
    duration_s: Seconds
    cpu_s: Seconds
    max_rss_kib: Count

    def value(self) -> Exit:
        return Exit(**self.model_dump())


class StatusLine(Wire):
    """One process of the guest's table."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    pid: Annotated[int, Field(ge=1, le=2**22)]
    argv: Annotated[list[str], Field(max_length=65536)]
    pty: bool
    started_at: Seconds
    stdout_bytes: Count
    stderr_bytes: Count
    exit: ExitLine | None

    def value(self) -> ProcessStatus:
        return ProcessStatus(
            id=self.id,
            pid=self.pid,
            argv=tuple(self.argv),
            pty=self.pty,
            started_at=self.started_at,
            stdout_bytes=self.stdout_bytes,
            stderr_bytes=self.stderr_bytes,
            exit=self.exit.value() if self.exit else None,
        )


class ProcessesLine(Wire):
    """The guest's process table."""

    processes: Annotated[list[StatusLine], Field(max_length=100_000)]


class OutputLine(Wire):
    """One line of a followed process: its start, some bytes, its end, or a sign of life."""

    started: StatusLine | None = None
    stream: Literal["stdout", "stderr"] | None = None
    offset: Count = 0
    lost: Count = 0
    data: Annotated[str, Field(max_length=131072)] = ""
    """Base64."""
    exit: ExitLine | None = None
    alive: bool = False


class EntryLine(Wire):
    """One file."""

    path: Path
    kind: Literal["file", "folder", "link", "other"]
    size: Count
    mode: Annotated[int, Field(ge=0, le=0o7777)]
    modified_at: Annotated[float, Field(ge=-1e12, le=1e12, strict=False)]

    def value(self) -> FileEntry:
        return FileEntry(**self.model_dump())


class ListingLine(Wire):
    """A folder's entries."""

    entries: Annotated[list[EntryLine], Field(max_length=10_000)]
    truncated: bool

    def value(self) -> Listing:
        entries = tuple(entry.value() for entry in self.entries)
        return Listing(entries=entries, truncated=self.truncated)


class PathsLine(Wire):
    """Paths found."""

    paths: Annotated[list[Path], Field(max_length=10_000)]
    truncated: bool

    def value(self) -> Paths:
        return Paths(paths=tuple(self.paths), truncated=self.truncated)


class MatchLine(Wire):
    """A line found."""

    path: Path
    line: Count
    text: Annotated[str, Field(max_length=65536)]


class MatchesLine(Wire):
    """Lines found."""

    matches: Annotated[list[MatchLine], Field(max_length=10_000)]
    truncated: bool

    def value(self) -> Matches:
        matches = tuple(Match(**match.model_dump()) for match in self.matches)
        return Matches(matches=matches, truncated=self.truncated)


class WatchLine(Wire):
    """One line of a watch: that it began, a change, or a sign of life."""

    watching: Path | None = None
    change: Literal["created", "changed", "removed", "overflow"] | None = None
    path: Path = ""
    alive: bool = False

    def value(self) -> Change | None:
        return Change(kind=self.change, path=self.path) if self.change else None


W = TypeVar("W", bound=Wire)


def parse(kind: type[W], raw: bytes | bytearray) -> W:
    """Read one message.

    Raises:
        GuestMisbehaved: it is not what the guest would say.
        ReplyTooLarge: it has too many parts to be taken in.
    """
    if len(raw) > _PARTS and sum(map(raw.count, (b",", b"[", b"{"))) > _PARTS:
        raise ReplyTooLarge(
            f"The answer has more than {_PARTS} parts.", remedy="Ask for a part of it."
        )
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        if (count := error.error_count()) > 100:  # To list them takes more than the message did.
            raise misbehaved(f"{kind.__name__}: {count} things that it never would") from None
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise misbehaved(f"{kind.__name__} {where}: {first['type']}") from None


def misbehaved(what: str) -> GuestMisbehaved:
    return GuestMisbehaved(
        f"The machine's guest sent what it never would ({clean(what)}).",
        remedy="Destroy the sandbox: code inside may have taken the guest over.",
    )


def clean(text: str, limit: int = 500) -> str:
    """Make text from inside a machine safe to show: bounded, and with no control characters."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return shown if len(shown) <= limit else shown[:limit] + "…"
