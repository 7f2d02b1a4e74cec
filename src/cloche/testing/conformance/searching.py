"""Finding files by name and by content."""

from __future__ import annotations

import asyncio
import time

import pytest

from cloche.core.errors import BadRequest, NoSuchFile, PathRefused
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
