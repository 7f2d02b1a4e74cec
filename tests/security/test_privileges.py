"""Privileges: the machine's user has none, and finds no way to any."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cloche.sandbox.sandbox import Sandbox

from . import probe

WHO = """
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>
#include <sys/prctl.h>
int main(void) {
    uid_t r, e, s; gid_t rg, eg, sg;
    getresuid(&r, &e, &s); getresgid(&rg, &eg, &sg);
    printf("%d %d %d %d %d %d", r, e, s, rg, eg, sg);
    return 0;
}
"""
NOBODY_SPECIAL = "1000 1000 1000 1000 1000 1000"
GUEST_CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8
"""KILL, SETGID, SETUID and SETPCAP."""


@pytest.fixture(scope="module")
async def who(sandbox: Sandbox) -> str:
    return await probe.build(sandbox, WHO, "who")


def _fields(status: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+):[ \t]*(.*?)[ \t]*$", status, re.MULTILINE))


@pytest.mark.parametrize("how", ["exec", "code", "terminal", "background"])
async def test_user_code_has_no_capability_by_any_door(sandbox: Sandbox, how: str) -> None:
    if how == "exec":
        said = (await sandbox.exec(["cat", "/proc/self/status"])).stdout
    elif how == "code":
        said = (await sandbox.run_code("bash", "cat /proc/self/status")).stdout
    else:
        terminal = (24, 80) if how == "terminal" else None
        process = await sandbox.start(["cat", "/proc/self/status"], pty=terminal)
        said = b"".join([chunk.data async for chunk in process.output()]).decode()
    status = _fields(said.replace("\r", ""))

    sets = {name: int(status[name], 16) for name in status if name.startswith("Cap")}
    assert sets == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["Uid"].split() == status["Gid"].split() == ["1000"] * 4
    assert status["Groups"] == ""


async def test_the_guest_itself_holds_only_what_it_needs(sandbox: Sandbox) -> None:
    running = await sandbox.start(["sleep", "60"])
    guests = {
        pid: fields
        for pid in probe.pids(sandbox)
        if (fields := _fields(Path(f"/proc/{pid}/status").read_text()))["Uid"].split()[0]
        == str(probe.host_id(sandbox))
    }
    await running.kill()

    assert len(guests) >= 2, "the server and a keeper"
    for fields in guests.values():
        assert int(fields["CapBnd"], 16) & ~GUEST_CAPABILITIES == 0, fields
        assert int(fields["CapEff"], 16) & ~GUEST_CAPABILITIES == 0, fields
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"
    assert probe.host_id(sandbox) > 1 << 30, "the machine's root is a user of the host"


async def test_no_call_gives_a_privilege_back(sandbox: Sandbox, numbers: dict[str, int]) -> None:
    said = await probe.ask(
        sandbox,
        """
        header = struct.pack("II", 0x20080522, 0)
        every = struct.pack("IIIIII", *[0xFFFFFFFF] * 6)
        said = {
            "setuid": attempt(os.setuid, 0),
            "setgid": attempt(os.setgid, 0),
            "setresuid": attempt(os.setresuid, 0, 0, 0),
            "setreuid": attempt(os.setreuid, 0, 0),
            "setgroups": attempt(os.setgroups, [0]),
            "capset": call(given["capset"], header, every),
            "ambient": call(given["prctl"], 47, 2, 21, 0, 0),
            "new privileges": call(given["prctl"], 38, 0, 0, 0, 0),
            "securebits": call(given["prctl"], 28, 1, 0, 0, 0),
        }
        libc.setfsuid(0), libc.setfsgid(0)
        answer([said, libc.setfsuid(-1), libc.setfsgid(-1), read("/root/.profile")])
        """,
        capset=numbers["capset"],
        prctl=numbers["prctl"],
    )

    assert set(said[0].values()) <= {"EPERM", "EINVAL"}, said
    assert said[1:3] == [1000, 1000]
    assert said[3] == "EACCES"


async def test_the_image_holds_no_program_with_rights_of_its_own(sandbox: Sandbox) -> None:
    found, count = await probe.ask(
        sandbox,
        """
        import stat
        found, count = [], 0
        for folder, folders, names in os.walk("/"):
            if folder in ("/proc", "/sys", "/dev"):
                folders.clear()
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.lstat(path)
                except OSError:
                    continue
                if not stat.S_ISREG(status.st_mode):
                    continue
                count += 1
                if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                    found.append(path)
                elif status.st_mode & 0o111:
                    if "security.capability" in os.listxattr(path, follow_symlinks=False):
                        found.append(path)
        answer([found, count])
        """,
        timeout_s=60,
    )

    assert count > 1000, "the probe hardly looked"
    assert found == []


async def test_a_setuid_program_of_the_users_own_has_no_effect(sandbox: Sandbox, who: str) -> None:
    said = await probe.shell(
        sandbox, f"cp {who} /workspace/mine && chmod 6755 /workspace/mine && /workspace/mine"
    )

    assert said == f"{NOBODY_SPECIAL}[exit code 0]"


async def test_a_setuid_program_of_the_machines_root_has_no_effect(
    sandbox: Sandbox, who: str
) -> None:
    """The second wall: should such a file ever get in, nosuid and no_new_privs stand."""
    await probe.shell(sandbox, f"cp {who} /workspace/planted")
    planted = probe.seen_from_host(sandbox, "/workspace/planted")
    os.chown(planted, probe.host_id(sandbox), probe.host_id(sandbox))
    planted.chmod(0o6755)

    listed = await probe.shell(sandbox, "stat -c '%u %a' /workspace/planted")
    said = await probe.shell(sandbox, "/workspace/planted")

    assert listed.startswith("0 6755"), listed
    assert said == f"{NOBODY_SPECIAL}[exit code 0]"


async def test_no_capability_can_be_put_on_a_file(sandbox: Sandbox, who: str) -> None:
    said = await probe.ask(
        sandbox,
        """
        every = struct.pack("<IIIII", 0x02000001, 0xFFFFFFFF, 0, 0x1FF, 0)
        answer([attempt(os.setxattr, given["who"], name, every) for name in
                ("security.capability", "trusted.overlay.opaque", "security.evil")]
               + [attempt(os.setxattr, given["who"], "user.control", b"x")])
        """,
        who=who,
    )

    assert "ok" not in said[:3], said
    assert said[3] in ("ok", "ENOTSUP"), said


@pytest.mark.parametrize("command", ["su -c id", "sudo -n id", "pkexec id", "newgrp root -c id"])
async def test_no_program_changes_the_user(sandbox: Sandbox, command: str) -> None:
    said = await probe.shell(sandbox, f"echo | timeout 5 {command}")

    assert "uid=0" not in said
    assert "gid=0" not in said


async def test_the_user_can_write_nowhere_that_the_guest_runs_from(sandbox: Sandbox) -> None:
    found = await probe.ask(
        sandbox,
        """
        found = []
        for folder, folders, names in os.walk("/"):
            if folder in ("/proc", "/sys", "/workspace", "/home/user", "/tmp", "/opt/venv"):
                folders.clear()
                continue
            if os.access(folder, os.W_OK):
                found.append(folder)
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path) and os.access(path, os.W_OK):
                    found.append(path)
        answer(found)
        """,
        timeout_s=60,
    )

    devices = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/pts/ptmx"
    allowed = {"/dev/shm", "/var/tmp", "/run/lock", "/var/lock", *devices.split()}
    assert "/dev/shm" in found, "the probe finds nothing at all"
    assert set(found) - allowed == set()
