"""The guest: root of the machine, in the same process list, and out of the user's reach."""

from __future__ import annotations

import secrets

import pytest

from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

REACH = """
n = given["numbers"]
word = ctypes.create_string_buffer(8)
local = struct.pack("PN", ctypes.addressof(word), 8)

def reach(pid):
    '''Try every way to touch another process; return what each said.'''
    stack = struct.pack("PN", 0x400000, 8)
    handle = libc.syscall(ctypes.c_long(n["pidfd_open"]), pid, 0)
    said = {
        "attach": call(n["ptrace"], 16, pid, 0, 0),
        "seize": call(n["ptrace"], 0x4206, pid, 0, 0),
        "read memory": call(n["process_vm_readv"], pid, local, 1, stack, 1, 0),
        "write memory": call(n["process_vm_writev"], pid, local, 1, stack, 1, 0),
        "take a descriptor": call(n["pidfd_getfd"], handle, 3, 0),
        "signal by handle": call(n["pidfd_send_signal"], handle, 0, 0, 0),
        "signal": attempt(os.kill, pid, 0),
        "limits": call(n["prlimit64"], pid, 7, struct.pack("QQ", 4, 4), 0),
        "processors": attempt(os.sched_setaffinity, pid, {0}),
        "priority": attempt(os.setpriority, os.PRIO_PROCESS, pid, 19),
        "scheduler": attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0)),
        "disk priority": call(n["ioprio_set"], 1, pid, 3 << 13),
        "release memory": call(n["process_mrelease"], handle, 0),
        "advise memory": call(n["process_madvise"], handle, stack, 1, 21, 0),
        "move pages": call(n["move_pages"], pid, 0, 0, 0, 0, 0),
        "compare": call(n["kcmp"], pid, os.getpid(), 0, 0, 0),
        "group": attempt(os.setpgid, pid, 0),
        "futexes": call(n["get_robust_list"], pid, word, word),
        "memory file": opens(f"/proc/{pid}/mem", os.O_RDONLY),
    }
    if handle >= 0:
        os.close(handle)
    return {way: word for way, word in said.items() if word == "ok"}
"""
CALLS = """
pidfd_open ptrace process_vm_readv process_vm_writev pidfd_getfd pidfd_send_signal prlimit64
ioprio_set process_mrelease process_madvise move_pages kcmp get_robust_list
""".split()


async def test_no_call_reaches_the_server_or_the_keeper(
    sandbox: Sandbox, numbers: dict[str, int]
) -> None:
    reached, own = await probe.ask(
        sandbox,
        REACH
        + """
child = os.fork()
if child == 0:
    time.sleep(60)
own = reach(child)
os.kill(child, signal.SIGKILL)
answer([{pid: reach(pid) for pid in (1, os.getppid())}, own])
""",
        numbers={name: numbers[name] for name in CALLS},
    )

    expected = {"attach", "signal", "signal by handle", "limits", "processors", "memory file"}
    assert expected <= set(own), f"the probe does not work on its own child: {own}"
    assert reached == {pid: {} for pid in reached}


async def test_no_signal_harms_the_guest(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox()
    said = await probe.ask(
        sandbox,
        """
        said = {}
        for pid in (1, os.getppid(), -os.getppid()):
            for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, 64):
                said[f"{pid} {number}"] = attempt(os.kill, pid, number)
        answer(said)
        """,
    )

    assert set(said.values()) <= {"EPERM", "ESRCH"}, said
    assert await probe.answers(sandbox)


async def test_a_signal_to_everyone_leaves_the_machine_standing(
    make_sandbox: MakeSandbox,
) -> None:
    sandbox = await make_sandbox()
    bystander = await sandbox.start(["sleep", "60"])

    await sandbox.exec(["bash", "-c", "kill -9 -1; sleep 1"], timeout_s=10)

    ended = await bystander.wait()
    assert ended.signal == 9, "the probe killed no one"
    assert await probe.answers(sandbox)


@pytest.mark.parametrize("how", ["exec", "stdin", "terminal", "code"])
async def test_a_command_is_handed_its_three_descriptors_alone(sandbox: Sandbox, how: str) -> None:
    """A descriptor of the keeper's channel would forge an exit, or swallow the order to die."""
    bystander = await sandbox.start(["sleep", "60"], stdin=True)
    listing = "import os; print(*sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    argv = ["/usr/bin/python3", "-I", "-c", listing]
    if how == "exec":
        said = (await sandbox.exec(argv)).stdout
    elif how == "stdin":
        said = (await sandbox.exec(argv, stdin=b"x")).stdout
    elif how == "code":
        said = (await sandbox.run_code("python", listing)).stdout
    else:
        process = await sandbox.start(argv, pty=(24, 80))
        said = b"".join([chunk.data async for chunk in process.output()]).decode()
    await bystander.kill()

    assert said.split() == ["0", "1", "2"]


LOADED = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void tell(void) {
    int log = open("/tmp/loaded", O_WRONLY | O_APPEND);
    dprintf(log, "%d\\n", geteuid());
    close(log);
}
"""


async def test_a_callers_environment_reaches_no_process_of_roots(
    make_sandbox: MakeSandbox,
) -> None:
    """The command's variables are its own: the keeper, root still, must not load from them."""
    sandbox = await make_sandbox()
    library = await probe.build(sandbox, LOADED, "loaded.so", "-shared", "-fPIC")
    await sandbox.files.write("/tmp/loaded", b"", mode=0o666)
    hostile = {
        "LD_PRELOAD": library,
        "LD_AUDIT": library,
        "LD_LIBRARY_PATH": "/tmp",
        "GCONV_PATH": "/tmp",
        "PYTHONPATH": "/tmp",
        "PYTHONINSPECT": "1",
        "BASH_ENV": "/tmp/loaded",
        "GLIBC_TUNABLES": "glibc.malloc.mxfast=" * 64,
        "PATH": "/tmp:/usr/bin:/bin",
    }

    await sandbox.exec(["true"], env=hostile)
    await sandbox.run_code("bash", "true", env=hostile)

    loaded = set((await sandbox.files.read_text("/tmp/loaded")).split())
    assert loaded == {"1000"}, "loaded by these users"


async def test_nothing_the_user_plants_is_run_by_the_guest(make_sandbox: MakeSandbox) -> None:
    """Modules, start-up files and programs of the names that a root process might look for."""
    sandbox = await make_sandbox()
    mark = f"/tmp/ran-{secrets.token_hex(4)}"
    tell = f"import os\nopen({mark!r}, 'a').write(f'{{os.geteuid()}} ' + __name__ + '\\n')\n"
    planted = f"#!/bin/sh\nid -u >> {mark}\n"
    await sandbox.files.write(mark, b"", mode=0o666)
    for folder in ("/workspace", "/home/user", "/tmp"):
        for module in ("shutil", "tempfile", "h11", "asyncio", "json", "sitecustomize", "tarfile"):
            await sandbox.files.write(f"{folder}/{module}.py", tell)
        for program in ("tar", "rg", "keeper", "sh", "python3"):
            await sandbox.files.write(f"{folder}/{program}", planted, mode=0o755)
    await probe.shell(
        sandbox,
        "mkdir -p ~/.local/bin; cp /workspace/tar /workspace/rg ~/.local/bin; for v in 3.11 3.12 "
        "3.13 3.14; do d=~/.local/lib/python$v/site-packages; mkdir -p $d; cp /workspace/json.py "
        "$d/usercustomize.py; done; echo '--pre=/workspace/rg' > ~/.ripgreprc; "
        "cp /workspace/sitecustomize.py /opt/venv/lib/python3*/site-packages/",
    )

    await sandbox.files.grep("x", "/workspace")
    async for _ in sandbox.files.download("/workspace"):
        pass
    await sandbox.files.glob("**/*")
    await sandbox.files.mkdir("/tmp/tree/deep")
    await sandbox.files.remove("/tmp/tree", recursive=True)
    await sandbox.exec(["seq", "200000"], timeout_s=20)  # Enough for a file in the guest's spool.
    control = await sandbox.run_code("python", "import json", env={"PYTHONPATH": "/workspace"})

    assert control.exit_code == 0 or control.stderr
    ran = (await sandbox.files.read_text(mark)).splitlines()
    assert any(line.startswith("1000") for line in ran), "the planted files cannot run at all"
    assert not [line for line in ran if line.startswith("0")]
