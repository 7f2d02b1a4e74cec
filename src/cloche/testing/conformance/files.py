"""Files: read, written, found and moved, with the rights of the machine's user."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import PurePosixPath

import pytest

from cloche.core.errors import BadRequest, FileRefused, NoSuchFile, PathRefused, ReplyTooLarge
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.conformance.commands import EVERY_BYTE

NAMES = [
    "plain.txt",
    "with space",
    "日本語 🪴",
    "ñ\N{COMBINING ACUTE ACCENT}",
    "-dash",
    "new\nline",
    "'\"`$(x)\\",
    "%2e%2e?&=#+",
    ".hidden",
    "x" * 255,
]

READER = """
import collections, sys, time
seen = collections.Counter()
end = time.time() + 2
while time.time() < end:
    data = open(sys.argv[1], "rb").read()
    seen[len(data), len(set(data))] += 1
print(dict(seen))
"""
"""Reads a file over and over, and tells which lengths and how many different bytes it saw."""


@pytest.mark.asyncio(loop_scope="session")
class TestFiles:
    """One file or folder at a time."""

    async def test_what_is_written_is_read_back(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/file", EVERY_BYTE)

        assert await sandbox.files.read(f"{folder}/file") == EVERY_BYTE
        seen = await sandbox.exec(["cat", f"{folder}/file"])
        assert seen.stdout_bytes == EVERY_BYTE, "the machine's programs see the same"

    async def test_text_goes_in_and_out_as_utf_8(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/text", "naïve 🪴\n")

        assert await sandbox.files.read_text(f"{folder}/text") == "naïve 🪴\n"

    async def test_an_empty_file_is_a_file(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/empty", b"")

        assert await sandbox.files.read(f"{folder}/empty") == b""
        assert (await sandbox.files.stat(f"{folder}/empty")).size == 0

    async def test_relative_paths_start_at_the_workspace(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("relative/file", b"x")

        assert await sandbox.files.read("/workspace/relative/file") == b"x"
        assert await sandbox.files.read(PurePosixPath("relative") / "file") == b"x"

    @pytest.mark.parametrize("root", ["/workspace", "/home/user", "/tmp"])
    async def test_the_users_folders_are_open(self, sandbox: Sandbox, root: str) -> None:
        await sandbox.files.write(f"{root}/opened", b"x")

        assert await sandbox.files.exists(f"{root}/opened")
        assert (await sandbox.files.stat(root)).kind == "folder"

    @pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
    async def test_any_name_will_do(self, sandbox: Sandbox, folder: str, name: str) -> None:
        path = f"{folder}/{name}"
        await sandbox.files.write(path, b"named")

        assert await sandbox.files.read(path) == b"named"
        assert [e.path for e in (await sandbox.files.list(folder)).entries] == [path]
        assert (await sandbox.files.stat(path)).path == path
        assert (await sandbox.files.glob("*", folder)).paths == (path,)
        await sandbox.files.move(path, f"{folder}/moved")
        await sandbox.files.remove(f"{folder}/moved")
        assert (await sandbox.files.list(folder)).entries == ()

    async def test_a_name_that_is_not_unicode_can_be_listed(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.exec(["python3", "-c", "open(b'a\\xffb', 'w')"], cwd=folder)

        [entry] = (await sandbox.files.list(folder)).entries
        found = await sandbox.files.glob("*", folder)

        assert entry.path == f"{folder}/a\N{REPLACEMENT CHARACTER}b"
        assert found.paths == (entry.path,)

    async def test_a_range_of_a_file_is_read(self, sandbox: Sandbox, folder: str) -> None:
        path = f"{folder}/file"
        await sandbox.files.write(path, b"0123456789")

        assert await sandbox.files.read(path, offset=3, limit=4) == b"3456"
        assert await sandbox.files.read(path, offset=8, limit=100) == b"89"
        assert await sandbox.files.read(path, limit=0) == b""
        assert await sandbox.files.read(path, offset=10) == b""
        assert await sandbox.files.read(path, offset=11) == b"", "beyond the end is nothing"

    @pytest.mark.parametrize(("offset", "limit"), [(-1, 1), (0, -1)])
    async def test_a_range_below_zero_is_refused(
        self, sandbox: Sandbox, folder: str, offset: int, limit: int
    ) -> None:
        await sandbox.files.write(f"{folder}/file", b"x")

        with pytest.raises(BadRequest):
            await sandbox.files.read(f"{folder}/file", offset=offset, limit=limit)

    async def test_a_file_larger_than_allowed_is_refused(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/file", b"x" * 1001)

        with pytest.raises(ReplyTooLarge):
            await sandbox.files.read(f"{folder}/file", max_bytes=1000)

        assert len(await sandbox.files.read(f"{folder}/file", max_bytes=1001)) == 1001

    async def test_large_files_are_streamed_both_ways(self, sandbox: Sandbox, folder: str) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for number in range(30):
                yield hashlib.shake_128(b"%d" % number).digest(1 << 20)

        await sandbox.files.write(f"{folder}/large", parts())

        expected, found = hashlib.sha256(), hashlib.sha256()
        async for part in parts():
            expected.update(part)
        async for data in sandbox.files.stream(f"{folder}/large"):
            found.update(data)
        assert found.digest() == expected.digest()
        tail = [d async for d in sandbox.files.stream(f"{folder}/large", offset=(30 << 20) - 5)]
        assert b"".join(tail) == hashlib.shake_128(b"29").digest(1 << 20)[-5:]

    async def test_a_written_file_has_the_mode_asked_for_and_belongs_to_the_user(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/usual", b"")
        await sandbox.files.write(f"{folder}/program", b"", mode=0o755)
        await sandbox.files.write(f"{folder}/secret", b"", mode=0o600)

        listed = await sandbox.exec(["stat", "-c", "%a %u %g", "usual", "program", "secret"],
                                    cwd=folder)  # fmt: skip

        assert listed.stdout == "644 1000 1000\n755 1000 1000\n600 1000 1000\n"
        assert (await sandbox.files.stat(f"{folder}/program")).mode == 0o755

    @pytest.mark.parametrize("mode", [-1, 0o1000, 0o4755, 1 << 40])
    async def test_a_mode_of_no_sense_is_refused(
        self, sandbox: Sandbox, folder: str, mode: int
    ) -> None:
        with pytest.raises(BadRequest):
            await sandbox.files.write(f"{folder}/file", b"", mode=mode)

        assert (await sandbox.files.list(folder)).entries == ()

    async def test_missing_folders_are_made_unless_told_otherwise(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/a/b/c", b"deep")
        with pytest.raises(NoSuchFile):
            await sandbox.files.write(f"{folder}/x/y", b"", parents=False)

        assert await sandbox.files.read(f"{folder}/a/b/c") == b"deep"

    async def test_a_reader_never_sees_half_a_file(self, sandbox: Sandbox, folder: str) -> None:
        path = f"{folder}/file"
        await sandbox.files.write(path, b"0" * 300_000)
        # In the machine, beside the guest: a read through the guest could be in step with it.
        watcher = await sandbox.start(["python3", "-c", READER, path])

        for number in range(1, 10):
            await sandbox.files.write(path, b"%d" % number * 300_000)
            await asyncio.sleep(0.05)

        said = b"".join([chunk.data async for chunk in watcher.output()])
        assert said.startswith(b"{(300000, 1): "), said
        assert said.count(b"(") == 1, f"half files: {said!r}"

    async def test_a_write_that_breaks_off_leaves_the_old_file(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield b"new " * 100_000
            raise _BrokenOffError

        await sandbox.files.write(f"{folder}/file", b"old")

        with pytest.raises(_BrokenOffError):
            await sandbox.files.write(f"{folder}/file", parts())

        assert await sandbox.files.read(f"{folder}/file") == b"old"
        async with asyncio.timeout(5):
            while len((await sandbox.files.list(folder)).entries) > 1:
                await asyncio.sleep(0.02)

    async def test_stat_tells_what_is_there(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/file", b"12345")
        await sandbox.exec(["sh", "-c", "mkdir sub; ln -s file link; mkfifo pipe"], cwd=folder)

        kinds = {
            name: (await sandbox.files.stat(f"{folder}/{name}")).kind
            for name in ("file", "sub", "link", "pipe")
        }
        entry = await sandbox.files.stat(f"{folder}/file")

        assert kinds == {"file": "file", "sub": "folder", "link": "link", "pipe": "other"}
        assert (entry.path, entry.size, entry.mode) == (f"{folder}/file", 5, 0o644)
        assert abs(entry.modified_at - time.time()) < 3600
        assert not await sandbox.files.exists(f"{folder}/nothing")

    async def test_a_folder_is_listed_in_order_and_not_its_subfolders(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        for name in ("b", "a", "sub/inner"):
            await sandbox.files.write(f"{folder}/{name}", b"")

        listing = await sandbox.files.list(folder)

        assert [entry.path for entry in listing.entries] == [
            f"{folder}/a",
            f"{folder}/b",
            f"{folder}/sub",
        ]
        assert not listing.truncated

    async def test_a_huge_folder_is_listed_in_part_and_says_so(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        code = "for n in range(10050): open(f'f{n:05d}', 'w').close()"
        await sandbox.exec(["python3", "-c", code], cwd=folder)

        listing = await sandbox.files.list(folder)
        found = await sandbox.files.glob("*", folder)

        assert (len(listing.entries), listing.truncated) == (10_000, True)
        assert (len(found.paths), found.truncated) == (10_000, True)

    async def test_folders_are_made_with_their_parents(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.mkdir(f"{folder}/a/b")
        await sandbox.files.mkdir(f"{folder}/a/b")

        assert (await sandbox.files.stat(f"{folder}/a/b")).kind == "folder"
        with pytest.raises(FileRefused):
            await sandbox.files.mkdir(f"{folder}/a/b", parents=False)
        with pytest.raises(NoSuchFile):
            await sandbox.files.mkdir(f"{folder}/x/y", parents=False)

    async def test_a_folder_cannot_be_made_where_a_file_is(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/file", b"")

        with pytest.raises(FileRefused):
            await sandbox.files.mkdir(f"{folder}/file")

    async def test_a_move_replaces_a_file_but_no_full_folder(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/new", b"new")
        await sandbox.files.write(f"{folder}/old", b"old")
        await sandbox.files.write(f"{folder}/full/file", b"")
        await sandbox.files.mkdir(f"{folder}/empty")

        await sandbox.files.move(f"{folder}/new", f"{folder}/old")

        assert await sandbox.files.read(f"{folder}/old") == b"new"
        assert not await sandbox.files.exists(f"{folder}/new")
        with pytest.raises(FileRefused):
            await sandbox.files.move(f"{folder}/empty", f"{folder}/full")
        with pytest.raises(NoSuchFile):
            await sandbox.files.move(f"{folder}/nothing", f"{folder}/x")
        with pytest.raises(NoSuchFile):
            await sandbox.files.move(f"{folder}/old", f"{folder}/no/folder")

    async def test_files_move_between_the_users_folders(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/file", b"moved")

        await sandbox.files.move(f"{folder}/file", "/home/user/arrived")

        assert await sandbox.files.read("/home/user/arrived") == b"moved"

    async def test_a_folder_from_the_image_can_be_moved(self, sandbox: Sandbox) -> None:
        # overlayfs answers EXDEV to a rename of a lower folder, and `mv` copies instead.
        await sandbox.files.move("/home/user/.npm-global", "/home/user/.npm-moved")

        assert (await sandbox.files.stat("/home/user/.npm-moved")).kind == "folder"
        await sandbox.files.move("/home/user/.npm-moved", "/home/user/.npm-global")

    async def test_files_and_empty_folders_are_removed_and_full_ones_on_demand(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/full/a/b/file", b"")
        await sandbox.files.mkdir(f"{folder}/empty")

        await sandbox.files.remove(f"{folder}/empty")
        with pytest.raises(FileRefused):
            await sandbox.files.remove(f"{folder}/full")
        await sandbox.files.remove(f"{folder}/full", recursive=True)

        assert (await sandbox.files.list(folder)).entries == ()
        with pytest.raises(NoSuchFile):
            await sandbox.files.remove(f"{folder}/full", recursive=True)

    async def test_the_users_folders_themselves_stay(self, sandbox: Sandbox) -> None:
        for root in ("/workspace", "/home/user", "/tmp", "/workspace/.", "/tmp/x/.."):
            with pytest.raises(PathRefused):
                await sandbox.files.remove(root, recursive=True)
            with pytest.raises(PathRefused):
                await sandbox.files.move(root, "/workspace/elsewhere")

    async def test_a_folder_is_not_a_file_and_a_file_no_folder(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/file", b"")

        with pytest.raises(FileRefused):
            await sandbox.files.read(folder)
        with pytest.raises(FileRefused):
            await sandbox.files.write(folder, b"")
        with pytest.raises((NoSuchFile, FileRefused)):
            await sandbox.files.list(f"{folder}/file")
        with pytest.raises((NoSuchFile, FileRefused)):
            await sandbox.files.read(f"{folder}/file/below")

    async def test_a_file_the_user_may_not_read_is_refused(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/locked", b"", mode=0)

        with pytest.raises(PathRefused):
            await sandbox.files.read(f"{folder}/locked")

    async def test_a_name_longer_than_the_kernel_takes_is_refused(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        with pytest.raises(FileRefused):
            await sandbox.files.write(f"{folder}/{'x' * 256}", b"")
        with pytest.raises(BadRequest):
            await sandbox.files.read("/workspace/" + "x/" * 3000)

    @pytest.mark.parametrize("path", ["", "a\0b", "\ud83e", "/workspace/\udcff"])
    async def test_a_path_of_no_sense_is_refused(self, sandbox: Sandbox, path: str) -> None:
        with pytest.raises(BadRequest):
            await sandbox.files.read(path)
        with pytest.raises(BadRequest):
            await sandbox.files.write(path, b"")

    async def test_special_files_neither_hang_nor_answer(
        self, sandbox: Sandbox, folder: str, time_scale: float
    ) -> None:
        script = (
            "mkfifo pipe; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('s')\""
        )
        await sandbox.exec(["sh", "-c", script], cwd=folder)

        async with asyncio.timeout(10 * time_scale):
            for name in ("pipe", "s"):
                with pytest.raises(FileRefused):
                    await sandbox.files.read(f"{folder}/{name}")
            await sandbox.files.write(f"{folder}/pipe", b"replaced")
            assert await sandbox.files.read(f"{folder}/pipe") == b"replaced"
            found = await sandbox.files.grep("replaced", folder)

        assert [match.path for match in found.matches] == [f"{folder}/pipe"]

    async def test_a_sparse_file_of_a_terabyte_does_no_harm(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.exec(["truncate", "-s", "1T", "sparse"], cwd=folder)

        assert (await sandbox.files.stat(f"{folder}/sparse")).size == 1 << 40
        with pytest.raises(ReplyTooLarge):
            await sandbox.files.read(f"{folder}/sparse", max_bytes=1000)
        assert await sandbox.files.read(f"{folder}/sparse", offset=1 << 39, limit=3) == b"\0" * 3
        await sandbox.files.remove(f"{folder}/sparse")

    async def test_a_stream_may_be_left_early(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/large", b"x" * 8_000_000)

        for _ in range(20):
            async with contextlib.aclosing(sandbox.files.stream(f"{folder}/large")) as parts:
                assert (await anext(parts)).startswith(b"x")

        assert len(await sandbox.files.read(f"{folder}/large")) == 8_000_000


class _BrokenOffError(Exception):
    """The caller's own source of bytes failed."""
