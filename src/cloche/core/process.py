"""What a command in a machine leaves behind."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes a process wrote. A terminal has only `stdout`."""

    stream: Stream
    offset: int
    """Where `data` starts in the stream, counted from the process's first byte."""
    data: bytes
    lost: int = 0
    """Bytes before `offset` that the machine no longer holds. Never silently skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended."""

    code: int
    """The exit code; 128 + the signal's number for a process that a signal ended."""
    signal: int | None = None
    timed_out: bool = False
    duration_s: float
    cpu_s: float
    """User and system time of the process and of the children it waited for."""
    max_rss_kib: int

    @property
    def reason(self) -> str:
        """A few words for people: `exit code 3`, `killed by SIGSEGV`, `timed out`."""
        if self.timed_out:
            return "timed out"
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """A finished command. A non-zero exit code is a result, not an error."""

    exit: Exit
    stdout_bytes: bytes
    stderr_bytes: bytes

    @property
    def exit_code(self) -> int:
        return self.exit.code

    @property
    def stdout(self) -> str:
        """What was written, as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One row of a machine's process list."""

    id: str
    pid: int
    argv: tuple[str, ...]
    pty: bool
    started_at: float
    """Seconds since the epoch, by the machine's clock."""
    stdout_bytes: int
    stderr_bytes: int
    exit: Exit | None
    """None while it runs."""
