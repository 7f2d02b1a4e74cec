"""A machine's id is its claim to a range of user ids."""

from __future__ import annotations

from pathlib import Path

from cloche.backends.container import record


def test_a_new_id_takes_a_range_that_no_machine_here_has(tmp_path: Path) -> None:
    for slot in range(4096):
        if slot != 0xABC:
            (tmp_path / f"{slot:03x}000000000").mkdir()

    assert record.new_id(tmp_path).startswith("abc")


def test_two_that_chose_the_same_range_both_see_it(tmp_path: Path) -> None:
    first, second, other = "abc000000001", "abc000000002", "abd000000001"
    for machine_id in (first, second, other):
        (tmp_path / machine_id).mkdir()

    assert record.is_contested(tmp_path, first)
    assert record.is_contested(tmp_path, second)
    assert not record.is_contested(tmp_path, other)


def test_ranges_do_not_touch_and_stay_below_the_sign_bit() -> None:
    starts = [record.first_id(f"{slot:03x}000000000") for slot in range(4096)]

    assert len(set(starts)) == 4096
    assert all(start % 65536 == 0 for start in starts)
    assert max(starts) + 65536 <= 2**31


def test_only_ids_are_taken_for_machines(tmp_path: Path) -> None:
    for name in ("abc000000001", ".new-abc000000002", ".sweep", "abc", "ABC000000001"):
        (tmp_path / name).mkdir()

    assert [path.name for path in record.folders(tmp_path)] == ["abc000000001"]
