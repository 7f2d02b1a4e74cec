"""Runs attacks inside a machine and brings back what the kernel said to them.

A snippet is Python for the machine's own interpreter, as the machine's user. It
ends in `answer(value)`; the value comes back through JSON. The same snippet run
by `ask_host` shows that it works where nothing stands in its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import textwrap
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from cloche.backends.container.cgroups import Cgroups
from cloche.core.errors import ClocheError
from cloche.sandbox.sandbox import Sandbox

PRELUDE = """
import ctypes, errno, json, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
given = json.loads(sys.argv[1])

def name_of(number):
    return errno.errorcode.get(number, str(number))

def call(number, *arguments):
    '''Make a system call; return "ok", or the name of its error.'''
    whole = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *whole)
    return "ok" if result >= 0 else name_of(ctypes.get_errno())

def attempt(action, *arguments):
    '''Do something; return "ok", or the name of its error.'''
    try:
        action(*arguments)
    except OSError as error:
        return name_of(error.errno)
    return "ok"

def read(path, limit=65536):
    '''Return the first bytes of a file as text, or the name of the error.'''
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("latin-1")
    except OSError as error:
        return name_of(error.errno)

def opens(path, flags):
    '''Return "ok" when the path can be opened so, or the name of the error.'''
    return attempt(lambda: os.close(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)))

def answer(value):
    print(json.dumps(value), flush=True)
"""


async def ask(sandbox: Sandbox, code: str, *, timeout_s: float = 20, **given: Any) -> Any:
    """Run a snippet in the machine; return what it answered."""
    argv = ["/usr/bin/python3", "-I", "-c", _whole(code), json.dumps(given)]
    result = await sandbox.exec(argv, timeout_s=timeout_s)
    assert result.exit_code == 0, f"the probe itself failed: {result.exit.reason}\n{result.stderr}"
    return json.loads(result.stdout)


async def ask_host(code: str, *, under: Sequence[str] = (), **given: Any) -> Any:
    """Run the same snippet on the host, for a positive control that harms nothing."""
    argv = [*under, sys.executable, "-I", "-c", _whole(code), json.dumps(given)]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, stderr.decode()
    return json.loads(stdout)


def _whole(code: str) -> str:
    return PRELUDE + textwrap.dedent(code)


async def shell(sandbox: Sandbox, script: str, *, timeout_s: float = 20) -> str:
    """Run a script in the machine; return all it said, and how it ended."""
    result = await sandbox.exec(["bash", "-c", f"exec 2>&1\n{script}"], timeout_s=timeout_s)
    return f"{result.stdout}[{result.exit.reason}]"


async def build(sandbox: Sandbox, source: str, name: str, *flags: str) -> str:
    """Compile C in the machine; return the program's path."""
    path = f"/tmp/{name}"
    await sandbox.files.write(f"{path}.c", source)
    result = await sandbox.exec(["gcc", "-O1", *flags, "-o", path, f"{path}.c"], timeout_s=60)
    assert result.exit_code == 0, result.stderr
    return path


async def syscall_numbers(sandbox: Sandbox) -> dict[str, int]:
    listing = ["gcc", "-E", "-dM", "-include", "sys/syscall.h", "-x", "c", "/dev/null"]
    result = await sandbox.exec(listing, timeout_s=20)
    assert result.exit_code == 0, result.stderr
    found = re.findall(r"#define __NR_(\w+) (\d+)$", result.stdout, re.MULTILINE)
    return {name: int(number) for name, number in found}


async def outcome(call: Awaitable[object]) -> object:
    """Return what a call returned, or the error of Cloche's that it raised."""
    try:
        return await call
    except ClocheError as error:
        return error


async def answers(sandbox: Sandbox) -> bool:
    """Return whether the machine still does what it is for."""
    result = await sandbox.exec(["echo", "here"], timeout_s=20)
    return result.stdout == "here\n"


def pids(sandbox: Sandbox) -> set[int]:
    """Return every process of the machine, by its number on the host."""
    return Cgroups(sandbox.id).pids()


def user_pids(sandbox: Sandbox) -> set[int]:
    """Return the living processes of the machine's user, by their numbers on the host."""
    user = str(host_id(sandbox, 1000))
    found = set()
    for pid in pids(sandbox):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text()
            if f"\nUid:\t{user}\t" in status and "\nState:\tZ" not in status:
                found.add(pid)
    return found


def first_pid(sandbox: Sandbox) -> int:
    """Return the machine's process 1, by its number on the host."""
    return sandbox.machine.record.pid  # type: ignore[attr-defined]


def seen_from_host(sandbox: Sandbox, path: str) -> Path:
    """Return a path of the machine as the host's root can reach it."""
    return Path(f"/proc/{first_pid(sandbox)}/root{path}")


def host_id(sandbox: Sandbox, inside: int = 0) -> int:
    """Return the host's number of a user of the machine."""
    _, first, _ = Path(f"/proc/{first_pid(sandbox)}/uid_map").read_text().split()
    return int(first) + inside
