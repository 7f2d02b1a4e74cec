"""Machines' disks, formatted or copied: the same empty file system either way."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cloche.backends.container import disk
from cloche.backends.container.disk import Disks
from cloche.core.errors import MachineNotStarted

pytestmark = pytest.mark.skipif(not shutil.which("mke2fs"), reason="mke2fs is not installed")


@pytest.mark.parametrize("size_mib", [64, 1024, 8192])
def test_a_copied_disk_is_as_sound_as_a_formatted_one(tmp_path: Path, size_mib: int) -> None:
    disks = Disks()
    for name in ("formatted", "copied", "again"):
        disks.make(tmp_path / name, size_mib)

    for name in ("formatted", "copied", "again"):
        found = (tmp_path / name).stat()
        assert found.st_size == size_mib << 20
        assert found.st_blocks * 512 < 1 << 20, "it takes space before it is used"
        check = ["e2fsck", "-fn", str(tmp_path / name)]
        subprocess.run(check, check=True, capture_output=True)
    compared = ["cmp", str(tmp_path / "formatted"), str(tmp_path / "copied")]
    assert size_mib > 1024 or subprocess.run(compared, check=False).returncode == 0


def test_no_more_than_so_many_sizes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SIZES", 2)
    disks = Disks()

    for number, size_mib in enumerate((64, 65, 66, 64, 66)):
        disks.make(tmp_path / str(number), size_mib)

    assert sorted(disks._empty) == [64, 66]


def test_a_disk_that_does_not_fit_is_an_error_in_words(tmp_path: Path) -> None:
    disks = Disks()
    disks.make(tmp_path / "first", 64)
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)], check=True)
    try:
        with pytest.raises(MachineNotStarted, match="64 MiB could not be formatted: No space"):
            disks.make(small / "second", 64)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_disk_is_never_put_in_the_place_of_another(tmp_path: Path) -> None:
    disks = Disks()
    disks.make(tmp_path / "first", 64)
    (tmp_path / "taken").write_bytes(b"precious")

    with pytest.raises(MachineNotStarted, match=os.strerror(17)):
        disks.make(tmp_path / "taken", 64)

    assert (tmp_path / "taken").read_bytes() == b"precious"
