"""Device nodes: the harmless few are there, and no other can be made or opened."""

from __future__ import annotations

import os
import stat

from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

EXPECTED = {
    "/dev/null": [1, 3], "/dev/zero": [1, 5], "/dev/full": [1, 7], "/dev/random": [1, 8],
    "/dev/urandom": [1, 9], "/dev/tty": [5, 0], "/dev/pts/ptmx": [5, 2],
}  # fmt: skip

TEMPTING = """
/dev/mem /dev/kmem /dev/port /dev/kmsg /dev/console /dev/loop0 /dev/loop-control /dev/fuse /dev/kvm
/dev/net/tun /dev/vda /dev/sda /dev/nvme0n1 /dev/dm-0 /dev/mapper/control /dev/btrfs-control
/dev/vhost-net /dev/vhost-vsock /dev/vsock /dev/userfaultfd /dev/hpet /dev/input/event0 /dev/ttyS0
/dev/tty0 /dev/dri/card0 /dev/nvidia0 /dev/uinput /dev/ppp /dev/rtc0 /dev/watchdog /dev/hugepages
""".split()


async def test_dev_holds_the_expected_devices_alone(sandbox: Sandbox) -> None:
    found = await probe.ask(
        sandbox,
        """
        import stat
        found = {}
        for folder, folders, names in os.walk("/"):
            if folder in ("/proc", "/sys"):
                folders.clear()
                continue
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.lstat(path)
                except OSError:
                    continue
                if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                    found[path] = [os.major(status.st_rdev), os.minor(status.st_rdev)]
        answer(found)
        """,
    )

    assert found == EXPECTED


async def test_the_devices_that_lead_to_the_host_are_not_there(sandbox: Sandbox) -> None:
    found = await probe.ask(
        sandbox, "answer({path: opens(path, os.O_RDONLY) for path in given['paths']})",
        paths=[*TEMPTING, "/dev/zero"],
    )  # fmt: skip

    assert found.pop("/dev/zero") == "ok", "the probe cannot open any device"
    assert set(found.values()) == {"ENOENT"}, found


async def test_no_device_can_be_made(sandbox: Sandbox) -> None:
    found = await probe.ask(
        sandbox,
        """
        import stat
        made = {}
        for folder in ("/workspace", "/tmp", "/dev", "/dev/shm", "/home/user"):
            for kind, major, minor in ((stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 1, 11),
                                       (stat.S_IFBLK, 7, 0), (stat.S_IFBLK, 254, 0)):
                path = f"{folder}/node-{kind}-{major}-{minor}"
                made[path] = attempt(os.mknod, path, kind | 0o666, os.makedev(major, minor))
        made["a file in /dev"] = opens("/dev/planted", os.O_CREAT | os.O_WRONLY)
        answer(made)
        """,
    )

    assert set(found.values()) <= {"EPERM", "EACCES"}, found


async def test_a_device_that_is_there_all_the_same_cannot_be_opened(
    make_sandbox: MakeSandbox,
) -> None:
    """The second wall: should a node ever get in, the mount and the device cgroup refuse it."""
    sandbox = await make_sandbox()
    kernel_log = os.makedev(1, 11)
    planted = ["/workspace/planted", "/tmp/planted", "/home/user/planted"]
    for path in planted:
        os.mknod(probe.seen_from_host(sandbox, path), stat.S_IFCHR | 0o666, kernel_log)
        probe.seen_from_host(sandbox, path).chmod(0o666)

    found = await probe.ask(
        sandbox,
        """
        answer({path: [os.stat(path).st_rdev, opens(path, os.O_RDONLY)] for path in given["paths"]})
        """,
        paths=planted,
    )

    assert {rdev for rdev, _ in found.values()} == {kernel_log}, "the nodes were not planted"
    assert {said for _, said in found.values()} <= {"EACCES", "EPERM"}, found


async def test_the_hosts_terminal_is_not_the_machines(sandbox: Sandbox) -> None:
    """A shared terminal takes typed input: TIOCSTI has escaped from `su` and `bwrap`."""
    found = await probe.ask(
        sandbox,
        """
        import fcntl, termios
        terminal = opens("/dev/tty", os.O_RDWR)
        master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        answer([terminal, [os.isatty(number) for number in range(3)], os.isatty(master)])
        """,
    )

    assert found == ["ENXIO", [False, False, False], True]
