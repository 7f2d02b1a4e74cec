"""Namespaces: no new one is made and no other is entered, for with one come capabilities."""

from __future__ import annotations

import pytest

from cloche.sandbox.sandbox import Sandbox

from . import probe

KINDS = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "time": 0x00000080,
}
CLONE = """
n = given["numbers"]

def clone(flags):
    '''Clone by the raw call; the child leaves at once.'''
    pid = libc.syscall(ctypes.c_long(n["clone"]), ctypes.c_long(flags | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        return name_of(ctypes.get_errno())
    os.waitpid(pid, 0)
    return "ok"

def clone3(flags):
    arguments = struct.pack("QQQQQQQQ", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    pid = libc.syscall(ctypes.c_long(n["clone3"]), arguments, ctypes.c_long(len(arguments)))
    if pid == 0:
        os._exit(0)
    return "ok" if pid > 0 else name_of(ctypes.get_errno())
"""


@pytest.fixture(scope="module")
def calls(numbers: dict[str, int]) -> dict[str, int]:
    return {name: numbers[name] for name in ("clone", "clone3", "unshare", "setns", "getpid")}


@pytest.mark.parametrize("kind", KINDS)
async def test_no_new_namespace(sandbox: Sandbox, calls: dict[str, int], kind: str) -> None:
    said = await probe.ask(
        sandbox,
        CLONE
        + """
flags = given["flags"]
answer({
    "unshare": call(n["unshare"], flags),
    "unshare with a user": call(n["unshare"], flags | 0x10000000),
    # The low byte of clone's flags is a signal: a time namespace cannot be asked for there.
    "clone": clone(flags) if flags > 255 else "EPERM",
    "clone with a user": clone(flags | 0x10000000),
    "clone, high bits set": clone(flags | 0x10000000 | 1 << 40),
    "clone3": clone3(flags),
    "clone3 with a user": clone3(flags | 0x10000000),
    "a plain clone": clone(0),
})
""",
        numbers=calls,
        flags=KINDS[kind],
    )

    assert said.pop("a plain clone") == "ok", "the probe cannot even fork"
    assert set(said.values()) <= {"EPERM", "ENOSYS"}, said


async def test_the_same_calls_work_where_they_are_allowed(calls: dict[str, int]) -> None:
    """The positive control, on the host: a child with a namespace that dies with it."""
    said = await probe.ask_host(
        CLONE + 'answer([clone(0x04000000), clone3(0x04000000), call(n["unshare"], 0x04000000)])',
        numbers=calls,
    )

    assert said == ["ok", "ok", "ok"]


async def test_no_namespace_can_be_entered(sandbox: Sandbox, calls: dict[str, int]) -> None:
    said = await probe.ask(
        sandbox,
        """
        said = {}
        for name in os.listdir("/proc/self/ns"):
            namespace = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
            said[name] = call(given["setns"], namespace, 0)
        own = libc.syscall(ctypes.c_long(given["pidfd_open"]), os.getpid(), 0)
        said["by handle"] = call(given["setns"], own, 0x10000000)
        answer(said)
        """,
        setns=calls["setns"],
        pidfd_open=434,
    )

    assert len(said) > 7
    assert set(said.values()) == {"EPERM"}, said


async def test_threads_and_children_still_work(sandbox: Sandbox) -> None:
    """What the filter must leave: the C library falls back from clone3 by itself."""
    said = await probe.ask(
        sandbox,
        """
        import subprocess, threading
        ran = []
        threads = [threading.Thread(target=ran.append, args=(1,)) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        answer([len(ran), subprocess.run(["echo", "x"], capture_output=True).stdout.decode()])
        """,
    )

    assert said == [8, "x\n"]
