"""Archives: many files in one go."""

from __future__ import annotations

import contextlib
import io
import random
import tarfile

import pytest

from cloche.core.errors import FileRefused, NoSuchFile, PathRefused
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.transcript import eventually


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

        found = await sandbox.exec(["find", "/workspace", "/var/tmp", "-name", "escaped"])
        outside = [path for path in found.stdout.split() if not path.startswith(f"{folder}/")]
        assert outside == []

    async def test_an_upload_does_not_follow_a_link_it_brought(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            link = tarfile.TarInfo("out")
            link.type, link.linkname = tarfile.SYMTYPE, "/var/tmp"
            tar.addfile(link)
            tar.addfile(tarfile.TarInfo("out/followed"))

        with contextlib.suppress(FileRefused):
            await sandbox.files.upload(buffer.getvalue(), folder)

        found = await sandbox.exec(["ls", "/var/tmp"])
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

    async def test_a_download_may_be_left_early(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.exec(["sh", "-c", "head -c 200M /dev/urandom > large"], cwd=folder)

        async with contextlib.aclosing(sandbox.files.download(folder)) as parts:
            await anext(parts)

        async def gone() -> bool:
            return "tar" not in (await sandbox.exec(["ps", "-eo", "comm"])).stdout

        await eventually(gone, "the packer to end", timeout_s=10)

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
        await sandbox.exec(["ln", "-s", "/var/tmp", "out"], cwd=folder)

        for path in ("/etc", "/var/tmp", f"{folder}/out", f"{folder}/../../var/tmp"):
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
