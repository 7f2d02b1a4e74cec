"""What the machine's user writes, names and prints, and the people and programs that read it."""

from __future__ import annotations

import asyncio
import time

import pytest

from cloche.core.errors import (
    BadRequest,
    ClocheError,
    CommandNotStarted,
    FileRefused,
    NoSuchFile,
    OutputTooLarge,
    PathRefused,
)
from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202etxt.exe\u2066\ufeff\x00\x7f"


async def test_no_terminal_escape_comes_through_an_error(sandbox: Sandbox) -> None:
    """An operator reads errors in a terminal; names inside are the attacker's to choose."""
    name = ESCAPES.replace("\0", "")
    await probe.ask(
        sandbox,
        "os.makedirs('/workspace/' + given['name'], exist_ok=True); "
        "os.symlink('/etc/' + given['name'], '/workspace/' + given['name'] + 'l'); answer(None)",
        name=name,
    )
    path = f"/workspace/{name}"
    calls = {
        "read": (sandbox.files.read(path), FileRefused),
        "missing": (sandbox.files.read(path + "/x"), NoSuchFile),
        "outside": (sandbox.files.read("/etc/" + name), PathRefused),
        "link": (sandbox.files.read(path + "l"), PathRefused),
        "program": (sandbox.exec([path]), CommandNotStarted),
        "folder": (sandbox.exec(["true"], cwd=path + "/x"), CommandNotStarted),
        "glob": (sandbox.files.glob(f"/{name}"), BadRequest),
        "grep": (sandbox.files.grep(f"({name}"), BadRequest),
        "archive": (sandbox.files.upload(b"x" * 2000, path), FileRefused),
        "tunnel": (sandbox.tunnel(unix=path + "/x"), NoSuchFile),
    }
    for call, (attempt, kind) in calls.items():
        error = await probe.outcome(attempt)

        assert isinstance(error, kind), f"{call}: {error!r}"
        assert error.message.isprintable(), f"{call}: {error.message!r}"
        assert len(error.message) < 2000


async def test_odd_names_are_told_and_harm_nothing(sandbox: Sandbox) -> None:
    names = await probe.ask(
        sandbox,
        r"""
        os.makedirs("/workspace/odd", exist_ok=True)
        names = [b"\xff\xfe", b"\x1b[2J", b"a\nb", b"x" * 255, "\U0001f512".encode(), b"\\u0000",
                 b'"}', b"\xed\xa0\x80", b"..."]
        for name in names:
            os.close(os.open(b"/workspace/odd/" + name, os.O_CREAT | os.O_WRONLY))
        answer(len(names))
        """,
    )

    listed = await sandbox.files.list("/workspace/odd")
    found = await sandbox.files.glob("**/*", "/workspace/odd")

    assert len(listed.entries) == len(found.paths) == names
    assert all(path.encode() for path in found.paths), "not valid Unicode"


async def test_a_line_without_an_end_does_not_break_a_search(sandbox: Sandbox) -> None:
    """Minified code is an honest case of it."""
    await probe.shell(
        sandbox,
        "mkdir -p long; echo a needle > long/two; "
        "head -c 3000000 /dev/zero | tr '\\0' a > long/one; echo needle >> long/one",
    )

    found = await sandbox.files.grep("needle", "/workspace/long")

    assert {match.path for match in found.matches} >= {"/workspace/long/two"}
    assert max(len(match.text) for match in found.matches) < 65536
    assert await probe.answers(sandbox)


async def test_a_huge_line_does_not_cost_the_guest_its_life(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox(memory_mib=384, disk_mib=512)
    await probe.shell(
        sandbox,
        "head -c 100000000 /dev/zero | tr '\\0' a > huge; echo needle >> huge",
        timeout_s=60,
    )
    searching = asyncio.ensure_future(sandbox.files.grep("needle"))
    await asyncio.sleep(1)

    began = time.monotonic()
    assert await probe.answers(sandbox)
    waited_s = time.monotonic() - began
    found = await probe.outcome(searching)

    assert not isinstance(found, ClocheError) or isinstance(found, BadRequest), found
    assert waited_s < 5, "the guest is too busy to answer"
    assert await sandbox.machine.alive()


async def test_no_pattern_runs_away(make_sandbox: MakeSandbox) -> None:
    """A glob that backtracks holds the interpreter, and with it every call."""
    sandbox = await make_sandbox()
    await sandbox.files.write("a" * 200, b"")
    await sandbox.files.write("/workspace/" + "a/" * 60 + "c", b"")
    began = time.monotonic()

    for pattern in ("*a" * 12 + "*b", "**/" * 20 + "b", "?*" * 20 + "b", "**a" * 12 + "b"):
        async with asyncio.timeout(20):
            assert (await sandbox.files.glob(pattern)).paths == ()

    assert time.monotonic() - began < 10
    assert await probe.answers(sandbox)


async def test_a_bottomless_folder_is_no_trap(sandbox: Sandbox) -> None:
    """Deeper than a path may be long, and than most programs recurse."""
    await probe.ask(
        sandbox,
        """
        os.makedirs("/workspace/deep", exist_ok=True)
        os.chdir("/workspace/deep")
        for _ in range(2500):
            os.mkdir("d")
            os.chdir("d")
        answer(None)
        """,
    )
    outcomes = {}
    for name, call in {
        "glob": sandbox.files.glob("**/none", "/workspace/deep"),
        "grep": sandbox.files.grep("none", "/workspace/deep"),
        "list": sandbox.files.list("/workspace/deep/d/d"),
        "remove": sandbox.files.remove("/workspace/deep", recursive=True),
    }.items():
        try:
            outcomes[name] = str(await call)[:80]
        except ClocheError as error:
            outcomes[name] = error.code

    assert not {"sandbox_lost", "guest_misbehaved"} & set(outcomes.values()), outcomes
    assert not await sandbox.files.exists("/workspace/deep"), outcomes


async def test_a_folder_of_many_names_is_told_in_part(sandbox: Sandbox) -> None:
    await probe.shell(
        sandbox, "mkdir -p many; cd many; seq -f %020g 15000 | xargs touch", timeout_s=60
    )

    listed = await sandbox.files.list("/workspace/many")
    found = await sandbox.files.glob("*", "/workspace/many")
    await sandbox.files.remove("/workspace/many", recursive=True)

    assert listed.truncated
    assert found.truncated
    assert len(listed.entries) == len(found.paths) == 10_000


@pytest.mark.parametrize("program", ["yes", "cat /dev/zero", "cat /dev/urandom >&2"])
async def test_a_flood_of_output_ends_at_the_callers_bound(sandbox: Sandbox, program: str) -> None:
    with pytest.raises(OutputTooLarge) as caught:
        await sandbox.exec(["bash", "-c", program], timeout_s=30, max_output_bytes=1 << 20)

    assert len(caught.value.stdout) + len(caught.value.stderr) <= 2 << 20
    assert probe.user_pids(sandbox) == set(), "the flood goes on"
    assert await probe.answers(sandbox)


async def test_a_flood_that_nobody_reads_is_bounded(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox(disk_mib=256, memory_mib=256)
    flood = await sandbox.start(["bash", "-c", "yes & yes >&2"])
    for _ in range(100):
        if (await flood.status()).stdout_bytes > 256 << 20:
            break
        await asyncio.sleep(0.1)
    usage = await sandbox.usage()
    written = (await flood.status()).stdout_bytes
    await sandbox.files.write("/workspace/still", b"x" * (16 << 20))
    await flood.kill()

    assert written > 256 << 20, "it is made to wait for a reader it does not have"
    assert usage.oom_kills == 0
    assert await probe.answers(sandbox)
