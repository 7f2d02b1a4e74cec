"""What a process has written, readable again from any byte.

Small output stays in memory, so that most commands touch no disk and a full
disk cannot keep a command from running. Larger output goes to a file that is
unlinked at once: nothing is left behind, whatever happens. Only the last bytes
are held; what is older is gone and counted, never silently skipped.
"""

from __future__ import annotations

import os

from cloche.guest import linux

IN_MEMORY = 256 * 1024
_PUNCH_EVERY = 1024 * 1024


class Spool:
    """One stream of one process. Offsets count from its first byte."""

    def __init__(self, folder: str, keep: int) -> None:
        self.start = 0
        """The oldest byte still held."""
        self.end = 0
        self._folder = folder
        self._keep = keep
        self._memory = bytearray()
        self._file: int | None = None
        self._punched = 0
        self._disk_full = False

    @property
    def capacity(self) -> int:
        """How many bytes can be held now: few once the disk is full."""
        return self._memory_bound() if self._disk_full else self._keep

    def append(self, data: bytes) -> None:
        if self._file is None and not self._disk_full and self.end + len(data) > IN_MEMORY:
            self._spill()
        if self._file is not None:
            try:
                _write_all(self._file, data, self.end)
            except OSError:
                self._abandon_file()
        if self._file is None:
            self._memory += data
            del self._memory[: max(0, len(self._memory) - self._memory_bound())]
        self.end += len(data)
        held = self._keep if self._file is not None else len(self._memory)
        self.start = max(self.start, self.end - held)
        if self._file is not None and self.start - self._punched >= _PUNCH_EVERY:
            linux.punch_hole(self._file, self._punched, self.start - self._punched)
            self._punched = self.start

    def read(self, offset: int, limit: int) -> bytes:
        """Return up to `limit` bytes from `offset`, which is not before `start`."""
        if self._file is not None:
            return os.pread(self._file, min(limit, self.end - offset), offset)
        begin = offset - (self.end - len(self._memory))
        return bytes(self._memory[begin : begin + limit])

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._memory.clear()
        self.start = self.end

    def _memory_bound(self) -> int:
        return min(IN_MEMORY, self._keep)

    def _spill(self) -> None:
        try:
            path = f"{self._folder}/{os.urandom(8).hex()}"
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink(path)  # noqa: PTH108 - pathlib is not loaded
            _write_all(self._file, self._memory, self.end - len(self._memory))
        except OSError:
            self._abandon_file()
        else:
            self._memory.clear()

    def _abandon_file(self) -> None:
        """Hold on to memory alone: the user's files have filled the disk."""
        self._disk_full = True
        if self._file is not None:
            tail = b""
            if not self._memory:
                begin = max(self.start, self.end - self._memory_bound())
                tail = os.pread(self._file, self.end - begin, begin)
            self._memory += tail
            os.close(self._file)
            self._file = None


def _write_all(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]
