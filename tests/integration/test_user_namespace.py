"""User namespaces made without a program, and what must not change while one is made."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche.backends.container.user_namespace import open_user_namespace

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="it takes root")

FIRST = 0x70120000
_NS_GET_OWNER_UID = 0xB704
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_IDENTITY = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "SigBlk")


@pytest.fixture(autouse=True)
def dumpable() -> None:
    """Be what a program is by default: another test may have changed this one's ids."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def identity() -> dict[str, str]:
    rows = Path("/proc/thread-self/status").read_text().splitlines()
    fields = dict(row.split(":", 1) for row in rows)
    return {name: fields[name].strip() for name in _IDENTITY}


def on_a_thread(act: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure


def test_the_namespace_shifts_ids_and_belongs_to_its_first_one() -> None:
    namespace = open_user_namespace(FIRST, 65536)
    try:
        owner = bytearray(4)
        fcntl.ioctl(namespace, _NS_GET_OWNER_UID, owner)
        command = ["nsenter", f"--user=/proc/self/fd/{namespace}", "cat", "/proc/self/uid_map"]
        inside = subprocess.run(
            [*command, "/proc/self/gid_map"],
            pass_fds=[namespace],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        os.close(namespace)

    assert struct.unpack("I", owner)[0] == FIRST
    assert inside.stdout.split() == ["0", str(FIRST), "65536"] * 2


def test_the_thread_and_the_program_are_what_they_were() -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before, others = identity(), children.read_text()
    open_files = set(Path("/proc/self/fd").iterdir())

    def act() -> None:
        at_first = identity()
        os.close(open_user_namespace(FIRST, 65536))
        assert identity() == at_first

    for _ in range(20):
        on_a_thread(act)

    assert identity() == before
    assert children.read_text() == others
    assert set(Path("/proc/self/fd").iterdir()) == open_files
    assert ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1


def test_a_refusal_leaves_nothing_behind() -> None:
    before = identity()

    with pytest.raises(OSError, match="Invalid argument"):
        open_user_namespace(FIRST, 0)

    assert identity() == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG | 0x40000000)


def test_many_threads_at_once() -> None:
    owners: list[int] = []

    def act(first: int) -> None:
        namespace = open_user_namespace(first, 65536)
        try:
            owner = bytearray(4)
            fcntl.ioctl(namespace, _NS_GET_OWNER_UID, owner)
            owners.append(struct.unpack("I", owner)[0])
        finally:
            os.close(namespace)

    expected = [FIRST + (number << 16) for number in range(16)]
    threads = [threading.Thread(target=act, args=(first,)) for first in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(owners) == expected
    assert identity()["Uid"].split() == ["0"] * 4
    assert ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
