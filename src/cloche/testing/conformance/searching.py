"""Finding files by name and by content, watching them, and moving them by the armful."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import tarfile
import time

import pytest

from cloche.core.errors import BadRequest, ClocheError, FileRefused, NoSuchFile, PathRefused
from cloche.core.files import Change
from cloche.sandbox.sandbox import Sandbox


@pytest.mark.asyncio(loop_scope="session")
class TestGlob:
    """Paths by pattern."""

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*.py", "a.py b.py"),
            ("**/*.py", "a.py b.py sub/c.py sub/deep/d.py"),
            ("sub/*", "sub/c.py sub/deep"),
            ("**", "a.py b.py readme sub sub/c.py sub/deep sub/deep/d.py"),
            ("?.py", "a.py b.py"),
            ("[ab].py", "a.py b.py"),
            ("[!a].py", "b.py"),
            ("[!a]*", "b.py readme sub"),
            ("sub/**/d.py", "sub/deep/d.py"),
            ("**/deep/**", "sub/deep/d.py"),
            ("nothing", ""),
        ],
    )
    async def test_a_pattern_finds_what_it_says(
        self, sandbox: Sandbox, pattern: str, expected: str
    ) -> None:
        top = "/workspace/globbed"
        for name in ("a.py", "b.py", "readme", "sub/c.py", "sub/deep/d.py"):
            await sandbox.files.write(f"{top}/{name}", b"")

        found = await sandbox.files.glob(pattern, top)

        assert [path.removeprefix(f"{top}/") for path in found.paths] == expected.split()
        assert not found.truncated

    @pytest.mark.parametrize("pattern", ["", "/etc/*", "a\0b", "x" * 2000])
    async def test_a_pattern_of_no_sense_is_refused(self, sandbox: Sandbox, pattern: str) -> None:
        with pytest.raises(BadRequest):
            await sandbox.files.glob(pattern)

    @pytest.mark.parametrize("pattern", ["**/" * 200 + "x", "*a" * 60 + "b", "**a" * 60 + "b"])
    async def test_no_pattern_takes_for_ever(
        self, sandbox: Sandbox, folder: str, pattern: str, time_scale: float
    ) -> None:
        await sandbox.files.write(f"{folder}/{'/'.join(['a'] * 30)}/{'a' * 200}", b"")
        began = time.monotonic()

        try:
            async with asyncio.timeout(5 * time_scale):
                await sandbox.files.glob(pattern, folder)
        except (BadRequest, TimeoutError):
            pass

        assert time.monotonic() - began < 5 * time_scale, f"{pattern[:12]}… runs away"

    async def test_links_are_listed_and_not_followed(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.exec(["sh", "-c", "ln -s /etc etc; ln -s . self"], cwd=folder)

        found = await sandbox.files.glob("**", folder)

        assert found.paths == (f"{folder}/etc", f"{folder}/self")


@pytest.mark.asyncio(loop_scope="session")
class TestGrep:
    """Lines by content."""

    async def test_lines_are_found_with_their_place(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/a.py", "one\ndef two():\n    pass\n")
        await sandbox.files.write(f"{folder}/sub/b.txt", "def three\n")

        found = await sandbox.files.grep(r"def \w+", folder)
        narrowed = await sandbox.files.grep(r"def \w+", folder, glob="*.py")

        lines = sorted((match.path, match.line, match.text) for match in found.matches)
        assert lines == [
            (f"{folder}/a.py", 2, "def two():"),
            (f"{folder}/sub/b.txt", 1, "def three"),
        ]
        assert [match.path for match in narrowed.matches] == [f"{folder}/a.py"]
        assert not found.truncated

    async def test_a_search_may_be_for_fixed_text_or_either_case(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/file", "a.c\nabc\nA.C\n")

        fixed = await sandbox.files.grep("a.c", folder, fixed=True)
        either = await sandbox.files.grep("a.c", folder, fixed=True, ignore_case=True)

        assert [match.line for match in fixed.matches] == [1]
        assert [match.line for match in either.matches] == [1, 3]

    async def test_nothing_found_is_an_answer(self, sandbox: Sandbox, folder: str) -> None:
        found = await sandbox.files.grep("nowhere to be seen", folder)

        assert found.matches == ()

    async def test_more_than_the_limit_is_told(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/file", "match\n" * 5000)

        found = await sandbox.files.grep("match", folder, limit=10)
        exactly = await sandbox.files.grep("match", folder, limit=5000)

        assert (len(found.matches), found.truncated) == (10, True)
        assert (len(exactly.matches), exactly.truncated) == (5000, False)

    @pytest.mark.parametrize("limit", [0, -1, 1 << 40])
    async def test_a_limit_of_no_sense_is_refused(self, sandbox: Sandbox, limit: int) -> None:
        with pytest.raises(BadRequest):
            await sandbox.files.grep("x", limit=limit)

    @pytest.mark.parametrize("pattern", ["(", "[", "a{99999999}", "*"])
    async def test_a_broken_pattern_is_refused(self, sandbox: Sandbox, pattern: str) -> None:
        with pytest.raises(BadRequest):
            await sandbox.files.grep(pattern)

    async def test_a_pattern_that_looks_like_an_option_is_a_pattern(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/file", "--files\n")

        found = await sandbox.files.grep("--files", folder)

        assert [match.text for match in found.matches] == ["--files"]

    async def test_a_very_long_line_is_cut_and_not_an_attack(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/minified.js", "x" * 300_000 + "needle" + "y" * 300_000)

        found = await sandbox.files.grep("needle", folder)

        assert [(match.path, match.line) for match in found.matches] == [
            (f"{folder}/minified.js", 1)
        ]
        assert len(found.matches[0].text) < 100_000

    async def test_many_long_lines_fit_into_one_answer(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/wide", ("needle " + "x" * 40_000 + "\n") * 800)

        found = await sandbox.files.grep("needle", folder)

        assert found.matches or found.truncated

    async def test_a_line_that_is_not_utf_8_is_found(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/latin", b"caf\xe9 needle\n")

        found = await sandbox.files.grep("needle", folder)

        assert [match.text for match in found.matches] == ["caf\N{REPLACEMENT CHARACTER} needle"]

    async def test_one_unreadable_file_does_not_spoil_the_search(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/open", b"needle\n")
        await sandbox.files.write(f"{folder}/locked", b"needle\n", mode=0)

        found = await sandbox.files.grep("needle", folder)

        assert [match.path for match in found.matches] == [f"{folder}/open"]

    async def test_a_search_stays_inside(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.exec(["ln", "-s", "/etc", "etc"], cwd=folder)

        below = await sandbox.files.grep("root:", folder)

        assert below.matches == ()
        for path in ("/etc", f"{folder}/etc", "/etc/passwd"):
            with pytest.raises(PathRefused):
                await sandbox.files.grep("root:", path)
        with pytest.raises(NoSuchFile):
            await sandbox.files.grep("root:", f"{folder}/nothing")


@pytest.mark.asyncio(loop_scope="session")
class TestWatch:
    """Changes, as they happen."""

    async def test_changes_are_told_as_they_happen(self, sandbox: Sandbox, folder: str) -> None:
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            begun = await _begun(sandbox, folder, changes)
            script = (
                "echo 1 > made; mv made moved; chmod 600 moved; rm moved; "
                "mkdir sub; sleep 0.3; echo 2 > sub/inner"
            )
            await sandbox.exec(["sh", "-c", script], cwd=folder)
            seen = await _until(changes, Change(kind="changed", path=f"{folder}/sub/inner"), begun)

        for kind, name in [
            ("created", "made"), ("changed", "made"), ("removed", "made"), ("created", "moved"),
            ("changed", "moved"), ("removed", "moved"), ("created", "sub"),
        ]:  # fmt: skip
            assert (kind, f"{folder}/{name}") in [(c.kind, c.path) for c in seen], seen

    async def test_files_written_by_the_host_are_told_too(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            begun = await _begun(sandbox, folder, changes)
            await sandbox.files.write(f"{folder}/file", b"x")
            await _until(changes, Change(kind="created", path=f"{folder}/file"), begun)

    async def test_a_watch_needs_a_folder_inside(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/file", b"")
        await sandbox.exec(["ln", "-s", "/etc", "etc"], cwd=folder)
        for path, error in [
            ("/etc", PathRefused),
            (f"{folder}/etc", PathRefused),
            (f"{folder}/nothing", NoSuchFile),
            (f"{folder}/file", ClocheError),
        ]:
            with pytest.raises(error):
                await anext(sandbox.files.watch(path))

    async def test_watches_that_were_left_are_let_go(self, sandbox: Sandbox, folder: str) -> None:
        # Linux grants a user 128 at a time, unless told otherwise.
        for _ in range(150):
            async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
                task = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            await _begun(sandbox, folder, changes)


async def _begun(sandbox: Sandbox, folder: str, changes: object) -> asyncio.Task[Change]:
    """Touch files until one is told of: from then on the watch misses nothing.

    Returns the wait for the change that comes next.
    """
    first = asyncio.ensure_future(anext(changes))  # type: ignore[call-overload]
    for number in range(200):
        await sandbox.files.write(f"{folder}/probe-{number}", b"")
        done, _ = await asyncio.wait([first], timeout=0.05)
        if done:
            return asyncio.ensure_future(anext(changes))  # type: ignore[call-overload]
    raise AssertionError("the watch never told of anything")


async def _until(changes: object, last: Change, upcoming: asyncio.Task[Change]) -> list[Change]:
    seen: list[Change] = []
    try:
        async with asyncio.timeout(10):
            while last not in seen:
                seen.append(await upcoming)
                upcoming = asyncio.ensure_future(anext(changes))  # type: ignore[call-overload]
    except TimeoutError:
        raise AssertionError(f"{last} was not told; seen {seen}") from None
    finally:
        upcoming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await upcoming
    return seen


@pytest.mark.asyncio(loop_scope="session")
class TestArchives:
    """Many files in one go, as a tar."""

    async def test_a_folder_goes_in_and_comes_out_as_a_tar(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        content = {"a.txt": b"alpha", "sub/ñ 🪴": bytes(range(256)), "sub/empty": b""}
        content["large"] = random.Random(1).randbytes(3_000_000)  # noqa: S311

        await sandbox.files.upload(_tar(content), folder)

        for name, data in content.items():
            assert await sandbox.files.read(f"{folder}/{name}") == data
        assert await _download(sandbox, folder) == content

    async def test_one_file_comes_out_as_a_tar_of_one(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/only", b"one")

        archive = b"".join([part async for part in sandbox.files.download(f"{folder}/only")])

        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            assert tar.getnames() == ["only"]

    async def test_an_upload_makes_its_folder(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.upload(_tar({"x": b"1"}), f"{folder}/new/deep")

        assert await sandbox.files.read(f"{folder}/new/deep/x") == b"1"

    async def test_an_upload_belongs_to_the_user_whoever_packed_it(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.upload(_tar({"x": b"1"}, uid=0, mode=0o6755), folder)

        told = await sandbox.exec(["stat", "-c", "%u %g %a", f"{folder}/x"])
        assert told.stdout == "1000 1000 755\n"

    @pytest.mark.parametrize("name", ["../escaped", "/workspace/../var/tmp/escaped"])
    async def test_an_upload_cannot_write_outside_its_folder(
        self, sandbox: Sandbox, folder: str, name: str
    ) -> None:
        with contextlib.suppress(FileRefused):
            await sandbox.files.upload(_tar({name: b"x"}), folder)

        found = await sandbox.exec(["find", "/workspace", "/var/tmp", "-name", "escaped"])  # noqa: S108
        outside = [path for path in found.stdout.split() if not path.startswith(f"{folder}/")]
        assert outside == []

    async def test_an_upload_does_not_follow_a_link_it_brought(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            link = tarfile.TarInfo("out")
            link.type, link.linkname = tarfile.SYMTYPE, "/var/tmp"  # noqa: S108
            tar.addfile(link)
            tar.addfile(tarfile.TarInfo("out/followed"))

        with contextlib.suppress(FileRefused):
            await sandbox.files.upload(buffer.getvalue(), folder)

        found = await sandbox.exec(["ls", "/var/tmp"])  # noqa: S108
        assert "followed" not in found.stdout

    @pytest.mark.parametrize("size", [600, 5_000_000])
    async def test_a_broken_archive_is_refused(
        self, sandbox: Sandbox, folder: str, size: int
    ) -> None:
        with pytest.raises(FileRefused):
            await sandbox.files.upload(b"no tar " * (size // 7), folder)

    async def test_a_cut_off_archive_is_refused(self, sandbox: Sandbox, folder: str) -> None:
        with pytest.raises(FileRefused):
            await sandbox.files.upload(_tar({"x": b"1" * 100_000})[:50_000], folder)

    async def test_a_download_of_what_changes_meanwhile_goes_through(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        script = "while :; do head -c 200000 /dev/zero >> log; sleep 0.002; done"
        writer = await sandbox.start(["sh", "-c", script], cwd=folder, timeout_s=20)
        await sandbox.files.write(f"{folder}/steady", b"s" * 1000)
        try:
            for _ in range(5):
                content = await _download(sandbox, folder)
                assert content["steady"] == b"s" * 1000
        finally:
            await writer.kill()

    async def test_an_unreadable_file_does_not_spoil_a_download(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/open", b"1")
        await sandbox.files.write(f"{folder}/locked", b"2", mode=0)

        assert (await _download(sandbox, folder))["open"] == b"1"

    async def test_a_download_stays_inside(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.exec(["ln", "-s", "/etc", "etc"], cwd=folder)

        for path, error in [
            ("/etc", PathRefused),
            (f"{folder}/etc/passwd", PathRefused),
            (f"{folder}/nothing", NoSuchFile),
        ]:
            with pytest.raises(error):
                await _download(sandbox, path)
        assert await _download(sandbox, folder) == {}, "a link is packed as a link"

    async def test_an_upload_stays_inside(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.exec(["ln", "-s", "/var/tmp", "out"], cwd=folder)  # noqa: S108

        for path in ("/etc", "/var/tmp", f"{folder}/out", f"{folder}/../../var/tmp"):  # noqa: S108
            with pytest.raises(PathRefused):
                await sandbox.files.upload(_tar({"x": b"1"}), path)


def _tar(content: dict[str, bytes], uid: int = 1234, mode: int = 0o644) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in content.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.uid, entry.gid, entry.mode = len(data), uid, uid, mode
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


async def _download(sandbox: Sandbox, path: str) -> dict[str, bytes]:
    """Fetch a tar of a folder; return its files by their path below it."""
    archive = b"".join([part async for part in sandbox.files.download(path)])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {
            member.name.partition("/")[2]: file.read()
            for member in tar
            if member.isfile() and (file := tar.extractfile(member)) is not None
        }
