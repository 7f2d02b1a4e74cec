"""A spool agrees with a plain string of bytes, whatever is done to it and wherever it breaks."""

from __future__ import annotations

import random
import resource
import tempfile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cloche.guest import spool as spool_module
from cloche.guest.spool import Spool

IN_MEMORY = 64
PUNCH_EVERY = 128


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds so small that a few bytes cross all of them."""
    monkeypatch.setattr(spool_module, "IN_MEMORY", IN_MEMORY)
    monkeypatch.setattr(spool_module, "_PUNCH_EVERY", PUNCH_EVERY)


class SpoolMachine(RuleBasedStateMachine):
    """The model is all that was ever written; a spool is a window on its end."""

    @initialize(keep=st.integers(1, 600), disk_bytes=st.just(1 << 40) | st.integers(0, 3000))
    def start(self, keep: int, disk_bytes: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.keep = keep
        self.disk_bytes = disk_bytes
        self.spool = Spool(self.folder.name, keep)
        self.model = b""
        self.oldest = 0
        self.cursor = self.delivered = self.lost = 0

    def teardown(self) -> None:
        if hasattr(self, "spool"):
            self.spool.close()
            self.folder.cleanup()

    @rule(size=st.integers(0, 400))
    def append(self, size: int) -> None:
        data = random.Random(len(self.model)).randbytes(size)
        # The kernel answers a write beyond this as it answers one to a full disk: with an error,
        # after it has taken what fits.
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.disk_bytes, before[1]))
        try:
            self.spool.append(data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.model += data

    @precondition(lambda self: self.model)
    @rule(place=st.floats(0, 1), limit=st.integers(0, 500))
    def read(self, place: float, limit: int) -> None:
        offset = self.spool.start + int(place * (self.spool.end - self.spool.start))

        assert self.spool.read(offset, limit) == self.model[offset : offset + limit]

    @rule(limit=st.integers(1, 500))
    def follow(self, limit: int) -> None:
        """Read on as a follower does, and account for every byte."""
        lost = max(0, self.spool.start - self.cursor)
        self.cursor += lost
        data = self.spool.read(self.cursor, limit)
        assert data == self.model[self.cursor : self.cursor + limit]
        self.cursor += len(data)
        self.lost += lost
        self.delivered += len(data)

        assert self.delivered + self.lost == self.cursor <= len(self.model)

    @invariant()
    def the_window_is_the_end_of_all_that_was_written(self) -> None:
        if not hasattr(self, "spool"):
            return
        start, end = self.spool.start, self.spool.end

        assert end == len(self.model)
        assert self.oldest <= start <= end, "what was gone is back"
        self.oldest = start
        assert end - start <= self.keep
        assert end - start >= min(len(self.model), self.keep, IN_MEMORY), (
            "more is gone than must be"
        )
        if self.disk_bytes > len(self.model):
            assert end - start == min(len(self.model), self.keep)
        assert self.spool.read(start, end - start + 1) == self.model[start:]


TestSpool = SpoolMachine.TestCase
TestSpool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
