"""The disk: a machine fills its own, down to the last inode, and lives to clear it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cloche.core.errors import MachineFull
from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

MIB = 1 << 20
DISK_MIB = 64


@pytest.fixture
async def small(make_sandbox: MakeSandbox) -> Sandbox:
    return await make_sandbox(disk_mib=DISK_MIB)


async def test_a_full_disk_is_bounded_and_can_be_cleared(small: Sandbox, data: Path) -> None:
    folder = data / "machines" / small.id
    written, word = await probe.ask(
        small,
        """
        written, word = 0, ""
        try:
            with open("/workspace/fill", "wb", buffering=0) as file:
                while written < 1 << 30:
                    written += file.write(bytes(1 << 20))
        except OSError as error:
            word = name_of(error.errno)
        for at in range(100_000):
            try:
                with open(f"/tmp/{at}", "wb", buffering=0) as file:
                    file.write(bytes(4096))
            except OSError:
                break
        answer([written, word])
        """,
        timeout_s=60,
    )
    taken = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())

    assert word == "ENOSPC"
    assert 40 * MIB < written < DISK_MIB * MIB
    assert taken < (DISK_MIB + 8) * MIB, "the host's disk gave more than the machine may have"
    with pytest.raises(MachineFull):
        await small.files.write("/workspace/more", b"x" * MIB)
    assert await probe.answers(small), "a command must still run"
    loud = await small.exec(["seq", "300000"], timeout_s=20)
    assert len(loud.stdout_bytes) == 1_988_895, "output is lost when the disk is full"
    await small.files.remove("/workspace/fill")
    await small.files.write("/workspace/more", b"x" * MIB)
    assert len((await small.files.list("/workspace")).entries) == 1


async def test_inodes_run_out_for_the_machine_alone(small: Sandbox, data: Path) -> None:
    before = shutil.disk_usage(data).free
    made, word = await probe.ask(
        small,
        """
        os.mkdir("/workspace/names")
        made, word = 0, ""
        try:
            while made < 100_000:
                os.close(os.open(f"/workspace/names/{made}", os.O_CREAT | os.O_WRONLY))
                made += 1
        except OSError as error:
            word = name_of(error.errno)
        answer([made, word])
        """,
        timeout_s=60,
    )

    assert word == "ENOSPC"
    assert 1000 < made < 50_000
    with pytest.raises(MachineFull):
        await small.files.write("/workspace/more", b"x")
    with pytest.raises(MachineFull):
        await small.files.mkdir("/workspace/folder")
    assert await probe.answers(small)
    assert before - shutil.disk_usage(data).free < 1024 * MIB
    await small.files.remove("/workspace/names", recursive=True)
    await small.files.write("/workspace/more", b"x")


async def test_a_file_of_holes_takes_nothing(small: Sandbox, data: Path) -> None:
    said = await probe.ask(
        small,
        """
        def grow():
            with open("/workspace/holes", "wb") as file:
                os.truncate(file.fileno(), 1 << 40)
        def reserve():
            with open("/workspace/reserved", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, 1 << 32)
        answer([attempt(grow), attempt(reserve)])
        """,
    )
    taken = (data / "machines" / small.id / "disk.img").stat().st_blocks * 512

    assert said[1] == "ENOSPC", said
    assert taken < (DISK_MIB + 8) * MIB
    assert await probe.answers(small)


async def test_a_removed_file_that_is_held_open_does_not_grow_the_disk(
    small: Sandbox, data: Path
) -> None:
    written = await probe.ask(
        small,
        """
        written = 0
        try:
            for number in range(64):
                file = os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY)
                os.unlink(f"/tmp/{number}")
                for _ in range(4):
                    written += os.write(file, bytes(1 << 20))
        except OSError:
            pass
        answer(written)
        """,
    )

    assert written < DISK_MIB * MIB
    assert (data / "machines" / small.id / "disk.img").stat().st_blocks * 512 < 72 * MIB
    assert await probe.answers(small)


async def test_no_other_place_can_be_filled(small: Sandbox) -> None:
    """Every file system that the user can write to is bounded, the small tmpfs ones included."""
    mounts = await probe.ask(
        small,
        """
        rows = [line.split() for line in read("/proc/self/mounts", 1 << 20).splitlines()]
        answer({row[1]: os.statvfs(row[1]).f_blocks * os.statvfs(row[1]).f_frsize
                for row in rows if os.path.isdir(row[1]) and os.access(row[1], os.W_OK)
                and "ro" not in row[3].split(",")})
        """,
    )

    assert "/dev/shm" in mounts
    assert {path: size >> 20 for path, size in mounts.items() if size > 256 * MIB} == {}
