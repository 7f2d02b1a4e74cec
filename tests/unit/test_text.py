"""Text in pieces never ends within a character, and loses nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloche.core.process import Chunk
from cloche.core.text import whole_length
from cloche.jobs.runner import _Batch


@given(st.text(max_size=40), st.integers(0, 60))
def test_a_cut_text_is_shown_up_to_its_last_whole_character(text: str, cut: int) -> None:
    data = text.encode()[:cut]

    shown = data[: whole_length(data)]

    assert len(data) - len(shown) <= 3
    assert text.startswith(shown.decode()), "half a character was shown"


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_held_back_for_a_moment_only(data: bytes) -> None:
    assert len(data) - whole_length(data) <= 3
    assert whole_length(data + b"\n") == len(data) + 1


pieces = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=6)))


@given(pieces, st.sets(st.integers(0, 30)))
def test_batches_lose_nothing_and_know_their_place(
    written: list[tuple[str, bytes]], taken_after: set[int]
) -> None:
    batch, sent, entries = _Batch(0), {"stdout": b"", "stderr": b""}, []
    for number, (stream, data) in enumerate(written):
        batch.add(Chunk(stream=stream, offset=len(sent[stream]), data=data))
        sent[stream] += data
        if number in taken_after:
            entries += batch.take()
    entries += batch.take(last=True)

    stored = {"stdout": b"", "stderr": b""}
    for entry in entries:
        assert entry.body["offset"] == len(stored[entry.body["stream"]])
        stored[entry.body["stream"]] += entry.data
    assert stored == sent
