"""Mounts: the machine's file systems stay as they were put together."""

from __future__ import annotations

import pytest

from cloche.sandbox.sandbox import Sandbox

from . import probe

MOUNT_CALLS = """
import tempfile
MS_REMOUNT, MS_BIND, MS_MOVE = 32, 4096, 8192
spot = tempfile.mkdtemp()
n = given["numbers"]
path = spot.encode()

def table():
    return read("/proc/self/mounts", 1 << 20)

before = table()
said = {
    "tmpfs": call(n["mount"], b"none", path, b"tmpfs", 0, 0),
    "proc": call(n["mount"], b"proc", path, b"proc", 0, 0),
    "sysfs": call(n["mount"], b"sysfs", path, b"sysfs", 0, 0),
    "cgroup": call(n["mount"], b"none", path, b"cgroup", 0, b"memory"),
    "cgroup2": call(n["mount"], b"none", path, b"cgroup2", 0, 0),
    "overlay": call(n["mount"], b"o", path, b"overlay", 0, b"lowerdir=/etc:/usr"),
    "bind": call(n["mount"], b"/proc", path, 0, MS_BIND, 0),
    "fuse": call(n["mount"], b"f", path, b"fuse", 0, b"fd=0,rootmode=40000,user_id=0,group_id=0"),
    "move": call(n["mount"], b"/proc", path, 0, MS_MOVE, 0),
    "remount root": call(n["mount"], 0, b"/", 0, MS_REMOUNT, 0),
    "remount settings": call(n["mount"], 0, b"/proc/sys", 0, MS_REMOUNT | MS_BIND, 0),
    "remount processors": call(n["mount"], 0, b"/sys/devices/system/cpu", 0,
                               MS_REMOUNT | MS_BIND, 0),
    "uncover": call(n["umount2"], b"/proc/kallsyms", 0),
    "uncover lazily": call(n["umount2"], b"/proc/sys", 2),
    "unmount root": call(n["umount2"], b"/", 2),
    "fsopen": call(n["fsopen"], b"tmpfs", 0),
    "fsconfig": call(n["fsconfig"], 0, 0, 0, 0, 0),
    "fsmount": call(n["fsmount"], 0, 0, 0),
    "fspick": call(n["fspick"], -100, b"/", 0),
    "open_tree": call(n["open_tree"], -100, b"/", 1),
    "move_mount": call(n["move_mount"], -100, b"/proc", -100, path, 0),
    "mount_setattr": call(n["mount_setattr"], -100, b"/proc/sys", 0, b"\\0" * 32, 32),
    "chroot": call(n["chroot"], path),
    "pivot_root": call(n["pivot_root"], path, path),
}
"""


@pytest.fixture(scope="module")
def mount_numbers(numbers: dict[str, int]) -> dict[str, int]:
    words = (
        "mount umount2 fsopen fsconfig fsmount fspick open_tree move_mount mount_setattr "
        "chroot pivot_root"
    )
    return {name: numbers[name] for name in words.split()}


async def test_no_mount_is_made_moved_or_taken_away(
    sandbox: Sandbox, mount_numbers: dict[str, int]
) -> None:
    said, unchanged = await probe.ask(
        sandbox, MOUNT_CALLS + "answer([said, table() == before])", numbers=mount_numbers
    )

    assert set(said.values()) == {"EPERM"}, said
    assert unchanged


async def test_the_same_calls_work_where_they_are_allowed(mount_numbers: dict[str, int]) -> None:
    """The positive control: in a mount namespace of its own, on the host, and gone with it."""
    code = """
    import tempfile
    path = tempfile.mkdtemp().encode()
    n = given["numbers"]
    said = [call(n["mount"], b"none", path, b"tmpfs", 0, 0), call(n["umount2"], path, 0),
            call(n["fsopen"], b"tmpfs", 0), call(n["open_tree"], -100, path, 1),
            call(n["chroot"], b"/")]
    os.rmdir(path)
    answer(said)
    """
    under = ["unshare", "--mount", "--propagation", "private"]

    assert await probe.ask_host(code, under=under, numbers=mount_numbers) == ["ok"] * 5


@pytest.mark.parametrize(
    "command",
    [
        "mount -t tmpfs none /mnt",
        "mount --bind / /mnt",
        "mount -o remount,rw /proc/sys",
        "umount -l /proc/sys",
        "chroot / true",
        "unshare --mount true",
        "unshare --user --map-root-user --mount true",
        "nsenter --target 1 --mount true",
    ],
)
async def test_no_program_of_the_image_finds_a_way(sandbox: Sandbox, command: str) -> None:
    said = await probe.shell(sandbox, f"PATH=$PATH:/usr/sbin:/sbin\n{command} && echo ESCAPED")

    assert "ESCAPED" not in said
    assert "not found" not in said, "the program is not there to try"


async def test_a_root_of_ones_own_is_no_way_out(sandbox: Sandbox) -> None:
    """The classic: chroot below, keep a folder above, walk up."""
    said = await probe.ask(
        sandbox,
        """
        os.makedirs("/tmp/jail", exist_ok=True)
        above = os.open("/", os.O_RDONLY)
        inside = attempt(os.chroot, "/tmp/jail")
        os.fchdir(above)
        for _ in range(64):
            os.chdir("..")
        answer([inside, os.stat(".").st_ino == os.stat("/").st_ino,
                os.path.exists("opt/cloche/bin/guest")])
        """,
    )

    assert said == ["EPERM", True, True]


async def test_every_mount_is_inert(sandbox: Sandbox) -> None:
    """nosuid and nodev wherever the machine's user can write or that is not the kernel's own."""
    mounts = await probe.ask(
        sandbox,
        """
        rows = [line.split() for line in read("/proc/self/mounts", 1 << 20).splitlines()]
        answer([[row[1], row[2], row[3].split(","), os.access(row[1], os.W_OK)
                 and os.path.isdir(row[1])] for row in rows])
        """,
    )

    suspect = [row for row in mounts if row[3] and not {"nosuid", "nodev"} <= set(row[2])]
    assert len(mounts) > 5
    assert suspect == []
