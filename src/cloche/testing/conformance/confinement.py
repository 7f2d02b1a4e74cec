"""Traps: links, `..` and races that would lead a file call out of the user's folders.

The places outside are ones that the machine's user may read or write, so that
only the confinement itself keeps the calls away from them.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from cloche.core.errors import ClocheError, NoSuchFile, PathRefused
from cloche.sandbox.process import Process
from cloche.sandbox.sandbox import Sandbox

OUTSIDE = "/var/tmp"

SWAP = """
import os, sys, time
inside, outside = sys.argv[1:]
end = time.time() + 30
os.symlink(inside, "link")
print("up", flush=True)
while time.time() < end:
    for target in (inside, outside):
        os.symlink(target, "next")
        os.rename("next", "link")
"""


@pytest.mark.asyncio(loop_scope="session")
class TestConfinement:
    """No path leads out."""

    @pytest.mark.parametrize(
        "path",
        [
            "/", "/etc/passwd", "/etc", "/workspacex", "/workspace/../etc/passwd",
            "//etc/passwd", "/home", "/home/userx", "/home/user/../../etc/passwd",
            "/proc/self/environ", "/dev/null", "/var/tmp/x", "../etc/passwd",
            "/workspace/./x/../../etc/passwd",
        ],
    )  # fmt: skip
    async def test_a_path_outside_is_refused_by_every_call(
        self, sandbox: Sandbox, path: str
    ) -> None:
        files = sandbox.files
        for call in (
            files.read(path), files.stat(path), files.list(path), files.mkdir(path),
            files.write(path, b"x"), files.remove(path), files.remove(path, recursive=True),
            files.move(path, "/workspace/x"), files.move("/workspace/x", path),
            files.glob("*", path), files.grep("x", path), files.exists(path),
        ):  # fmt: skip
            with pytest.raises(PathRefused):
                await call

    async def test_slashes_and_dots_that_stay_inside_are_fine(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/a/file", b"x")

        for path in (f"/{folder}/a/file", f"{folder}/./a//file", f"{folder}/b/../a/file"):
            assert await sandbox.files.read(path) == b"x", path

    @pytest.mark.parametrize(
        "target",
        [
            "/etc/passwd",
            "../../etc/passwd",
            "../../../../../../etc/passwd",
            "/proc/self/root/etc/passwd",
            "/proc/1/root/etc/passwd",
            "/workspace/../etc/passwd",
            "/dev/fd/0",
        ],
    )
    async def test_a_link_to_a_file_outside_is_not_followed(
        self, sandbox: Sandbox, folder: str, target: str
    ) -> None:
        await sandbox.exec(["ln", "-s", target, "link"], cwd=folder)

        with pytest.raises((PathRefused, NoSuchFile)):
            await sandbox.files.read(f"{folder}/link")

        assert (await sandbox.files.stat(f"{folder}/link")).kind == "link"

    async def test_a_link_that_stays_inside_is_followed(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/real/file", b"inside")
        await sandbox.files.write("/tmp/target", b"another root")
        script = (
            "ln -s real/file relative; ln -s $PWD/real/file absolute; ln -s real folder; "
            "ln -s $PWD/real absfolder; ln -s absolute chain; ln -s chain longer; "
            "ln -s /tmp/target other; ln -s ../$(basename $PWD)/real/file dots"
        )
        await sandbox.exec(["sh", "-c", script], cwd=folder)

        for name in (
            "relative", "absolute", "folder/file", "absfolder/file", "chain", "longer", "dots",
        ):  # fmt: skip
            assert await sandbox.files.read(f"{folder}/{name}") == b"inside", name
        assert await sandbox.files.read(f"{folder}/other") == b"another root"

    async def test_a_chain_of_links_that_leaves_is_refused(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        script = "ln -s /etc/passwd a; ln -s a b; ln -s $PWD/b c; mkdir d; ln -s ../c d/e"
        await sandbox.exec(["sh", "-c", script], cwd=folder)

        for name in ("a", "b", "c", "d/e"):
            with pytest.raises(PathRefused):
                await sandbox.files.read(f"{folder}/{name}")

    async def test_a_link_to_itself_is_refused_and_does_not_hang(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.exec(["sh", "-c", "ln -s b a; ln -s a b; ln -s self self"], cwd=folder)

        async with asyncio.timeout(10):
            for name in ("a", "self", "self/x"):
                with pytest.raises((PathRefused, NoSuchFile)):
                    await sandbox.files.read(f"{folder}/{name}")

    async def test_a_folder_link_outside_is_not_entered_by_any_call(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.exec(["sh", "-c", f"ln -s {OUTSIDE} out; touch {OUTSIDE}/bait"], cwd=folder)
        files, out = sandbox.files, f"{folder}/out"

        for call in (
            files.read(f"{out}/bait"), files.stat(f"{out}/bait"), files.list(out),
            files.write(f"{out}/new", b"x"), files.write(f"{out}/a/b", b"x"),
            files.mkdir(f"{out}/made"), files.mkdir(f"{out}/made/deep"),
            files.remove(f"{out}/bait"), files.move(f"{out}/bait", f"{folder}/x"),
            files.glob("*", out), files.grep("x", out),
        ):  # fmt: skip
            with pytest.raises(PathRefused):
                await call
        await files.write(f"{folder}/own", b"x")
        with pytest.raises(PathRefused):
            await files.move(f"{folder}/own", f"{out}/moved")

        left = await sandbox.exec(["ls", OUTSIDE])
        assert left.stdout == "bait\n", "nothing came, nothing went"

    async def test_writing_to_a_link_replaces_the_link_and_not_what_it_leads_to(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        script = f"echo precious > {OUTSIDE}/target; ln -s {OUTSIDE}/target link"
        await sandbox.exec(["sh", "-c", script], cwd=folder)

        await sandbox.files.write(f"{folder}/link", b"mine")

        assert (await sandbox.exec(["cat", f"{OUTSIDE}/target"])).stdout == "precious\n"
        assert (await sandbox.files.stat(f"{folder}/link")).kind == "file"
        assert await sandbox.files.read(f"{folder}/link") == b"mine"

    async def test_removing_a_folder_removes_links_and_not_what_they_lead_to(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        script = f"mkdir -p {OUTSIDE}/kept sub; touch {OUTSIDE}/kept/x; ln -s {OUTSIDE}/kept sub/l"
        await sandbox.exec(["sh", "-c", script], cwd=folder)

        await sandbox.files.remove(f"{folder}/sub", recursive=True)

        assert (await sandbox.exec(["ls", f"{OUTSIDE}/kept"])).stdout == "x\n"

    async def test_a_refused_write_of_megabytes_is_told_as_refused(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        for _ in range(3):
            with pytest.raises(PathRefused):
                await sandbox.files.write("/etc/large", b"x" * 5_000_000)

    async def test_a_link_swapped_in_a_race_never_leads_out(
        self, sandbox: Sandbox, folder: str, time_scale: float
    ) -> None:
        script = f"mkdir in {OUTSIDE}/raced; echo inside > in/file; echo OUT > {OUTSIDE}/raced/file"
        await sandbox.exec(["sh", "-c", script], cwd=folder)
        swapper = await sandbox.start(
            ["python3", "-c", SWAP, f"{folder}/in", f"{OUTSIDE}/raced"], cwd=folder
        )
        assert (await anext(swapper.output())).data == b"up\n"
        reads = {"inside": 0, "refused": 0}
        end = time.monotonic() + 3 * time_scale

        while time.monotonic() < end:
            try:
                assert await sandbox.files.read(f"{folder}/link/file") == b"inside\n"
                reads["inside"] += 1
            except ClocheError as error:
                assert isinstance(error, PathRefused | NoSuchFile), error
                reads["refused"] += 1
            for call in (
                sandbox.files.write(f"{folder}/link/written", b"x"),
                sandbox.files.mkdir(f"{folder}/link/made/deep"),
                sandbox.files.remove(f"{folder}/link/made", recursive=True),
            ):
                try:
                    await call
                except ClocheError as error:
                    assert isinstance(error, PathRefused | NoSuchFile), error

        status = await swapper.status()
        assert status.exit is None, f"it stopped swapping: {await _stderr(swapper)!r}"
        await swapper.kill()
        outside = await sandbox.exec(["ls", f"{OUTSIDE}/raced"])
        assert outside.stdout == "file\n", "a call was led out"
        assert min(reads.values()) > 3, f"the race was not one: {reads}"


async def _stderr(process: Process) -> bytes:
    return b"".join([chunk.data async for chunk in process.output() if chunk.stream == "stderr"])
