"""Archives: whatever a tar names, it is unpacked into its folder as the machine's user."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator

import pytest

from cloche.core.errors import ClocheError, FileRefused, MachineFull
from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

Member = tuple[tarfile.TarInfo, bytes]
UNTOUCHED = (
    "find /dev/shm /etc /opt /usr/local /root /run /home /tmp /var -xdev "
    "-printf '%p %m %U %l %s\\n' 2>/dev/null | sort | sha256sum; cat /dev/shm/outside/file"
)


def _file(name: str, data: bytes = b"planted", **fields: object) -> Member:
    return _entry(name, tarfile.REGTYPE, size=len(data), **fields)[0], data


def _entry(name: str, kind: bytes, **fields: object) -> Member:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    for field, value in {"mode": 0o755, **fields}.items():
        setattr(entry, field, value)
    return entry, b""


def _link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    return _entry(name, kind, linkname=target)


def _pack(*members: Member) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry, data in members:
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


HOSTILE: dict[str, list[Member]] = {
    "absolute name": [_file("/dev/shm/outside/planted"), _file("/etc/planted")],
    "dots": [_file("../../dev/shm/outside/planted"), _file("a/../../../dev/shm/outside/planted")],
    "dots alone": [_entry("..", tarfile.DIRTYPE, mode=0o777), _file("../planted")],
    "through a link": [_link("out", "/dev/shm/outside"), _file("out/planted")],
    "through a relative link": [_link("out", "../../dev/shm/outside"), _file("out/planted")],
    "through two links": [_link("a", "/dev"), _link("b", "a/shm"), _file("b/outside/planted")],
    "over a linked file": [_link("out", "/dev/shm/outside/file"), _file("out")],
    "folder over a link": [
        _link("out", "/dev/shm/outside"),
        _entry("out", tarfile.DIRTYPE, mode=0o777),
        _file("out/planted"),
    ],
    "hard link out": [
        _link("hard", "/dev/shm/outside/file", tarfile.LNKTYPE),
        _file("hard"),
    ],
    "hard link up": [
        _link("hard", "../../dev/shm/outside/file", tarfile.LNKTYPE),
        _file("hard"),
    ],
    "hard link to a link": [
        _link("soft", "/dev/shm/outside/file"),
        _link("hard", "soft", tarfile.LNKTYPE),
        _file("hard"),
    ],
    "character device": [_entry("node", tarfile.CHRTYPE, devmajor=1, devminor=1)],
    "block device": [_entry("node", tarfile.BLKTYPE, devmajor=7, devminor=0)],
    "another name in the extended header": [
        _file("harmless", pax_headers={"path": "/dev/shm/outside/planted"})
    ],
    "capability in the extended header": [
        _file("capable", pax_headers={"SCHILY.xattr.security.capability": "\x01"})
    ],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
async def _outside(sandbox: Sandbox) -> None:
    await probe.shell(
        sandbox, "mkdir -p /dev/shm/outside && echo untouched > /dev/shm/outside/file"
    )


@pytest.mark.parametrize("attack", HOSTILE)
async def test_a_hostile_archive_stays_in_its_folder(sandbox: Sandbox, attack: str) -> None:
    await probe.shell(sandbox, "rm -rf /workspace/into; mkdir /workspace/into")
    before = await probe.shell(sandbox, UNTOUCHED)

    archive = _pack(_file("control"), *HOSTILE[attack])
    outcome = await probe.outcome(sandbox.files.upload(archive, "/workspace/into"))

    assert outcome is None or isinstance(outcome, FileRefused), outcome
    unpacked = await probe.shell(sandbox, "find /workspace/into -ls")
    assert "control" in unpacked, "nothing was unpacked at all"
    assert await probe.shell(sandbox, UNTOUCHED) == before, unpacked


async def test_an_archive_gives_no_rights(sandbox: Sandbox) -> None:
    await probe.shell(sandbox, "rm -rf /workspace/into")
    await sandbox.files.upload(
        _pack(
            _file("mine", mode=0o6777, uid=0, gid=0, uname="root", gname="root"),
            _entry("folder", tarfile.DIRTYPE, mode=0o6777, uid=0),
        ),
        "/workspace/into",
    )

    listed = await probe.shell(sandbox, "stat -c '%u:%g %a' /workspace/into/*")

    assert "0:0" not in listed
    modes = [int(line.split()[1], 8) for line in listed.splitlines() if line.startswith("1000")]
    assert len(modes) == 2, listed
    assert not [mode for mode in modes if mode & 0o6000], listed


async def test_a_folder_that_was_a_link_all_along_is_refused(sandbox: Sandbox) -> None:
    """Planted beforehand by the code inside, for the next archive to write through."""
    await probe.shell(
        sandbox,
        "rm -rf /workspace/into; mkdir /workspace/into; ln -s /dev/shm/outside /workspace/into/sub",
    )
    before = await probe.shell(sandbox, UNTOUCHED)

    with pytest.raises(ClocheError):
        await sandbox.files.upload(_pack(_file("x")), "/workspace/into/sub")

    assert await probe.shell(sandbox, UNTOUCHED) == before


def _sparse_bomb() -> bytes:
    """A tebibyte of nothing, in a kilobyte: GNU's old sparse format."""
    entry = tarfile.TarInfo("bomb")
    entry.type = tarfile.GNUTYPE_SPARSE
    entry.size = 0
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"00000000000\x0000000000000\x00"
    header[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def _endless() -> Iterator[bytes]:
    entry = tarfile.TarInfo("fill")
    entry.size = 1 << 30
    yield entry.tobuf()
    for _ in range(1 << 10):
        yield bytes(1 << 20)


async def test_an_archive_that_fills_the_disk_is_refused(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox(disk_mib=64)

    async def body(make: Callable[[], Iterator[bytes]]) -> object:
        for piece in make():
            yield piece

    with pytest.raises((FileRefused, MachineFull)):
        await sandbox.files.upload(body(_endless), "/workspace/into")

    await sandbox.files.remove("/workspace/into", recursive=True)
    await sandbox.files.write("/workspace/after", b"x" * (1 << 20))
    assert await probe.answers(sandbox)


@pytest.mark.parametrize(
    "archive",
    [b"", b"garbage" * 1000, _pack(_file("x", b"y" * 5000))[:700], bytes(1 << 20), _sparse_bomb()],
    ids=["nothing", "garbage", "cut short", "zeros", "sparse bomb"],
)
async def test_what_is_no_archive_harms_nothing(sandbox: Sandbox, archive: bytes) -> None:
    outcome = await probe.outcome(sandbox.files.upload(archive, "/workspace/odd"))

    assert outcome is None or isinstance(outcome, FileRefused), outcome
    assert await probe.answers(sandbox)


@pytest.mark.parametrize(
    "name",
    ["--checkpoint-action=exec=touch /tmp/ran", "--to-command=touch /tmp/ran", "-I touch /tmp/ran",
     "--use-compress-program=touch /tmp/ran", "-", "--", "a b\nc", "$(touch /tmp/ran)"],
)  # fmt: skip
async def test_a_name_is_never_an_option(sandbox: Sandbox, name: str) -> None:
    await sandbox.files.write(f"/workspace/{name}/file", b"x")
    await sandbox.files.write("/workspace/--checkpoint=1", b"x")

    packed = b"".join([chunk async for chunk in sandbox.files.download(f"/workspace/{name}")])
    await sandbox.files.upload(packed, f"/workspace/{name}/again")
    await sandbox.files.grep("x", f"/workspace/{name}")
    await sandbox.files.grep(name.replace("\n", ""), "/workspace", fixed=True, glob=name)

    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert any(member.endswith("/file") for member in archive.getnames())
    assert not await sandbox.files.exists("/tmp/ran")
