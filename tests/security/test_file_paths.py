"""Paths in file calls: no link and no `..` leads out of the user's folders.

What lies outside here is a folder that the machine's user may read and write, so
that the kernel's own permissions do not hide a hole in the resolution of paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cloche.core.errors import BadRequest, ClocheError, FileRefused, NoSuchFile, PathRefused
from cloche.sandbox.files import Files
from cloche.sandbox.sandbox import Sandbox

from . import probe

SECRET = "what lies outside"
TRAPS = {
    "dots": "/workspace/../dev/shm/outside",
    "dots after a real folder": "/workspace/inside/../../dev/shm/outside",
    "plain": "/dev/shm/outside",
    "two slashes": "//dev/shm/outside",
    "absolute link": "/workspace/absolute",
    "relative link": "/workspace/relative",
    "link to a link": "/workspace/chain",
    "link through /proc": "/workspace/magic",
    "link through another root": "/workspace/hop",
    "guest's own root": "/proc/self/root/dev/shm/outside",
    "guest's own folder": "/proc/self/cwd/dev/shm/outside",
    "system folder": "/etc/ssl",
}
SET_UP = """
mkdir -p /dev/shm/outside/folder /workspace/inside/folder
printf %s "what lies outside" | tee /dev/shm/outside/file > /dev/shm/outside/folder/file
cp -r /dev/shm/outside/. /workspace/inside
cd /workspace
ln -sfn /dev/shm/outside absolute
ln -sfn ../dev/shm/outside relative
ln -sfn absolute chain
ln -sfn /proc/self/root/dev/shm/outside magic
ln -sfn /tmp/hop hop
ln -sfn /dev/shm/outside /tmp/hop
ln -sfn loop loop
"""
UNTOUCHED = """
find /dev/shm/outside -type f -exec cat {} + | sha256sum
find /dev/shm /etc | sort | sha256sum
"""


def _tar(name: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    return packed.getvalue()


async def _first(chunks: Any) -> object:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            return chunk
    return b""


async def _watched(files: Files, folder: str) -> object:
    """Watch a folder while something happens to it inside."""
    changes = asyncio.ensure_future(_first(files.watch(folder)))
    for _ in range(20):
        await asyncio.sleep(0.05)
        if changes.done():
            break
        await files.write("/workspace/inside/changed", b"x")
    changes.cancel()
    return await changes


READS: dict[str, Callable[[Files, str], Awaitable[object]]] = {
    "read": lambda files, top: files.read(f"{top}/file"),
    "read a range": lambda files, top: files.read(f"{top}/file", offset=1, limit=3),
    "read_text": lambda files, top: files.read_text(f"{top}/file"),
    "stream": lambda files, top: _first(files.stream(f"{top}/file")),
    "stat": lambda files, top: files.stat(f"{top}/file"),
    "exists": lambda files, top: files.exists(f"{top}/file"),
    "list": lambda files, top: files.list(f"{top}/folder"),
    "list it": lambda files, top: files.list(top),
    "glob": lambda files, top: files.glob("**/*", top),
    "grep": lambda files, top: files.grep("lies", top),
    "grep a file": lambda files, top: files.grep("lies", f"{top}/file"),
    "download": lambda files, top: _first(files.download(top)),
    "download a file": lambda files, top: _first(files.download(f"{top}/file")),
    "watch": _watched,
}
WRITES: dict[str, Callable[[Files, str], Awaitable[object]]] = {
    "write": lambda files, top: files.write(f"{top}/file", b"x"),
    "write anew": lambda files, top: files.write(f"{top}/new", b"x", parents=False),
    "write with parents": lambda files, top: files.write(f"{top}/a/b/new", b"x"),
    "mkdir": lambda files, top: files.mkdir(f"{top}/made", parents=False),
    "mkdir with parents": lambda files, top: files.mkdir(f"{top}/a/b/c"),
    "move from": lambda files, top: files.move(f"{top}/file", "/workspace/taken"),
    "move to": lambda files, top: files.move("/workspace/movable", f"{top}/moved"),
    "remove": lambda files, top: files.remove(f"{top}/file"),
    "remove a tree": lambda files, top: files.remove(f"{top}/folder", recursive=True),
    "upload": lambda files, top: files.upload(_tar("uploaded"), top),
    "upload below": lambda files, top: files.upload(_tar("uploaded"), f"{top}/new"),
}


@pytest.fixture(autouse=True)
async def _traps(sandbox: Sandbox) -> None:
    said = await probe.shell(
        sandbox,
        "rm -rf /dev/shm/outside /workspace/* /tmp/hop; touch /workspace/movable\n" + SET_UP,
    )
    assert said == "[exit code 0]"


@pytest.mark.parametrize("call", [*READS, *WRITES])
async def test_no_spelling_leads_a_call_out(sandbox: Sandbox, call: str) -> None:
    make = {**READS, **WRITES}[call]
    before = await probe.shell(sandbox, UNTOUCHED)
    outcomes: dict[str, object] = {}
    for trap, folder in TRAPS.items():
        try:
            outcomes[trap] = await make(sandbox.files, folder)
        except (PathRefused, NoSuchFile) as error:
            outcomes[trap] = type(error)
    after = await probe.shell(sandbox, UNTOUCHED)
    control = await make(sandbox.files, "/workspace/inside")

    # A path that does not exist in the guest's own eyes is as good as one that is refused.
    assert set(outcomes.values()) <= {PathRefused, NoSuchFile}, outcomes
    assert list(outcomes.values()).count(PathRefused) >= len(TRAPS) - 2, outcomes
    assert after == before
    assert control is None or control, "the call does not work on a path that is allowed"


async def test_a_link_in_last_place_is_handled_and_not_followed(sandbox: Sandbox) -> None:
    files = sandbox.files
    await probe.shell(sandbox, "ln -s /dev/shm/outside/file /workspace/link")
    before = await probe.shell(sandbox, UNTOUCHED)

    assert (await files.stat("/workspace/link")).kind == "link"
    with pytest.raises(PathRefused):
        await files.read("/workspace/link")
    await files.write("/workspace/link", b"replaced")
    assert (await files.stat("/workspace/link")).kind == "file"
    await files.move("/workspace/absolute", "/workspace/moved")
    assert (await files.stat("/workspace/moved")).kind == "link"
    await files.remove("/workspace/moved", recursive=True)
    await files.remove("/workspace/relative")

    assert await probe.shell(sandbox, UNTOUCHED) == before


async def test_links_met_on_the_way_through_a_tree_are_not_followed(sandbox: Sandbox) -> None:
    paths = (await sandbox.files.glob("**/*")).paths
    matches = (await sandbox.files.grep("lies")).matches
    packed = b"".join([chunk async for chunk in sandbox.files.download("/workspace")])
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = {member.name: member for member in archive}
    await sandbox.files.remove("/workspace/inside", recursive=True)
    await probe.shell(sandbox, "mkdir /workspace/tree; ln -s /dev/shm/outside /workspace/tree/link")
    before = await probe.shell(sandbox, UNTOUCHED)
    await sandbox.files.remove("/workspace/tree", recursive=True)

    assert "/workspace/absolute" in paths
    assert not [path for path in paths if path.startswith("/workspace/absolute/")]
    assert {match.path for match in matches} == {
        "/workspace/inside/file",
        "/workspace/inside/folder/file",
    }
    assert members["workspace/absolute"].issym()
    assert not [name for name in members if name.startswith("workspace/absolute/")]
    assert await probe.shell(sandbox, UNTOUCHED) == before


SWAP = """
import ctypes, os, time
libc = ctypes.CDLL(None)
os.makedirs("/workspace/race/real", exist_ok=True)
open("/workspace/race/real/file", "w").write("within")
os.symlink("/dev/shm/outside", "/workspace/race/link")
os.rename("/workspace/race/real", "/workspace/race/swap")
print("ready", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end:
    for _ in range(1000):
        libc.renameat2(-100, b"/workspace/race/swap", -100, b"/workspace/race/link", 2)
"""


async def test_a_folder_that_turns_into_a_link_is_not_followed(sandbox: Sandbox) -> None:
    """However fast the two are swapped, what is checked is what is opened."""
    before = await probe.shell(sandbox, UNTOUCHED)
    swapping = await sandbox.start(["/usr/bin/python3", "-c", SWAP])
    await _first(swapping.output())
    files, top = sandbox.files, "/workspace/race/swap"
    read: set[object] = set()
    for _ in range(60):
        for call in (
            files.read(f"{top}/file"),
            files.write(f"{top}/file", b"within", parents=False),
            files.mkdir(f"{top}/made", parents=False),
            files.list(top),
            files.remove(f"{top}/made"),
        ):
            try:
                read.add(await call)
            except (PathRefused, NoSuchFile, FileRefused) as error:
                read.add(type(error))
    await swapping.kill()
    after = await probe.shell(sandbox, UNTOUCHED)
    await sandbox.files.remove("/workspace/race", recursive=True)

    assert {b"within", PathRefused} <= read, f"the race was never run: {read}"
    assert SECRET.encode() not in read
    assert after == before


@pytest.mark.parametrize(
    "path",
    ["", "\0", "/workspace/\0", "x" * 5000, "/workspace/" + "y" * 300, "\udc80", "/workspace/loop",
     "/workspace/" + "d/" * 2000, "/", ".", "..", "../..", "/workspace/file/", "~/x", "/tmp/../.."],
)  # fmt: skip
async def test_a_malformed_path_is_refused_by_every_call(sandbox: Sandbox, path: str) -> None:
    outcomes = {}
    for call in (sandbox.files.read, sandbox.files.remove, sandbox.files.stat, sandbox.files.list):
        try:
            outcomes[call.__name__] = await call(path)
        except ClocheError as error:
            outcomes[call.__name__] = type(error)

    refusals = {BadRequest, PathRefused, NoSuchFile, FileRefused}
    kept = {name: outcome for name, outcome in outcomes.items() if outcome not in refusals}
    # `.` is the workspace itself, `~` an ordinary name, and a link that loops can be described.
    assert set(kept) <= {"stat", "list", "remove"} if path in (".", "/workspace/loop") else not kept
    assert await probe.answers(sandbox)


async def test_what_is_no_file_is_not_read(sandbox: Sandbox) -> None:
    """A read that never ends, or that a peer must finish, would hold the guest's thread."""
    await probe.ask(
        sandbox,
        """
        server = socket.socket(socket.AF_UNIX)
        server.bind("/workspace/socket")
        os.symlink("/dev/zero", "/workspace/zero")
        answer(None)
        """,
    )
    for path, refusal in (("socket", FileRefused), ("zero", PathRefused), ("inside", FileRefused)):
        with pytest.raises(refusal):
            await sandbox.files.read(path)
