"""What a process has written, readable again from any byte."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.guest import spool as spool_module
from cloche.guest.spool import IN_MEMORY, Spool

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def small_disk() -> Iterator[int]:
    """A disk that takes this many bytes of one file, and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, before[1]))
    yield 2 * MIB
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def test_what_is_written_is_read_back_from_any_byte(folder: str) -> None:
    spool = Spool(folder, keep=64 * MIB)
    spool.append(b"hello ")
    spool.append(b"world")

    assert (spool.start, spool.end) == (0, 11)
    assert spool.read(0, 100) == b"hello world"
    assert spool.read(6, 3) == b"wor"
    assert spool.read(11, 100) == b""


def test_little_output_touches_no_disk(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "missing"), keep=64 * MIB)

    spool.append(noise(IN_MEMORY))

    assert spool.read(0, IN_MEMORY) == noise(IN_MEMORY)
    assert spool.capacity == 64 * MIB


def test_much_output_goes_to_a_file_that_has_no_name(folder: str) -> None:
    spool = Spool(folder, keep=64 * MIB)
    data = noise(3 * MIB)

    for part in range(0, len(data), 50_000):
        spool.append(data[part : part + 50_000])

    assert spool.read(0, len(data)) == data
    assert list(Path(folder).iterdir()) == []
    spool.close()


def test_only_the_last_bytes_are_held_and_the_rest_is_counted(folder: str) -> None:
    spool = Spool(folder, keep=2 * MIB)
    data = noise(7 * MIB)

    for part in range(0, len(data), 65536):
        spool.append(data[part : part + 65536])

    assert (spool.start, spool.end) == (5 * MIB, 7 * MIB)
    assert spool.read(spool.start, 2 * MIB) == data[5 * MIB :]
    spool.close()


def test_what_is_no_longer_held_takes_no_space(folder: str) -> None:
    spool = Spool(folder, keep=2 * MIB)
    for _ in range(20):
        spool.append(noise(MIB))

    assert spool._file is not None
    taken = os.fstat(spool._file).st_blocks * 512
    spool.close()

    assert taken < 5 * MIB, f"{taken} bytes for 2 MiB"


def test_without_a_disk_a_little_is_held_and_nothing_is_lost_in_silence(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "missing"), keep=64 * MIB)
    data = noise(3 * IN_MEMORY)

    for part in range(0, len(data), 10_000):
        spool.append(data[part : part + 10_000])

    assert spool.end == len(data)
    assert spool.end - spool.start == IN_MEMORY
    assert spool.read(spool.start, len(data)) == data[-IN_MEMORY:]
    assert spool.capacity == IN_MEMORY


def test_a_disk_that_fills_up_leaves_what_fits_in_memory(folder: str, small_disk: int) -> None:
    spool = Spool(folder, keep=64 * MIB)
    data = noise(small_disk + MIB)

    for part in range(0, len(data), 65536):
        spool.append(data[part : part + 65536])

    assert spool.end == len(data)
    assert spool.read(spool.start, len(data)) == data[spool.start :]
    assert spool.end - spool.start == IN_MEMORY


def test_one_write_larger_than_all_that_is_held_keeps_its_end(folder: str) -> None:
    spool = Spool(folder, keep=MIB)
    data = noise(5 * MIB)

    spool.append(data)

    assert (spool.start, spool.end) == (4 * MIB, 5 * MIB)
    assert spool.read(4 * MIB, MIB) == data[4 * MIB :]
    spool.close()


def test_a_closed_spool_holds_nothing_and_no_file(folder: str) -> None:
    spool = Spool(folder, keep=64 * MIB)
    spool.append(noise(MIB))
    before = len(list(Path("/proc/self/fd").iterdir()))

    spool.close()

    assert spool.start == spool.end == MIB
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1


def test_the_module_is_the_one_that_runs_in_machines() -> None:
    assert "cloche/guest" in str(spool_module.__file__)
