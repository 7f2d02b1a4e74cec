"""The real image of this host, damaged copies of it, and builds that are cut short."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloche.app import Host
from cloche.core.errors import (
    ImageBuildFailed,
    ImageCorrupt,
    ImageMissing,
    OperatorError,
    UserError,
)
from cloche.core.image import Image
from cloche.core.spec import SandboxSpec
from cloche.sandbox.images import Images, Progress, store
from cloche.sandbox.images.guest import GuestLayer, guest_sources
from cloche.sandbox.sandbox import Sandbox
from cloche.settings import Settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="building images needs root")

BUILD = """
import asyncio, sys
from pathlib import Path
from cloche.sandbox.images import Images
asyncio.run(Images(Path(sys.argv[1])).build())
"""


@pytest.fixture(scope="module")
def image() -> Image:
    try:
        return Images(Settings().data).find()
    except ImageMissing as missing:
        pytest.skip(f"{missing.message} {missing.remedy}")


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder that passes for the image of this recipe as far as `find` looks."""
    images = Images(tmp_path)
    folder = images._current
    for entry in store._ESSENTIAL:
        path = folder / "rootfs" / entry
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    layer = folder / GuestLayer(guest_sources()).name / "opt/cloche/bin/guest"
    layer.parent.mkdir(parents=True)
    layer.write_text("x")
    record = {
        "name": "base",
        "digest": images._digest,
        "suite": "trixie",
        "architecture": "x86_64",
        "size_bytes": 1,
        "built_at": "2026-01-01T00:00:00+00:00",
    }
    (folder / "image.json").write_text(json.dumps(record))
    return folder


def _inside(image: Image, script: str) -> str:
    """Run `script` as the machine's user in the image's root file system."""
    path = "/opt/venv/bin:/home/user/.npm-global/bin:/home/user/.local/bin:/usr/local/bin:/usr/bin"
    as_user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs"]
    environment = ["env", "-i", f"PATH={path}:/bin", "HOME=/home/user"]
    done = subprocess.run(
        ["chroot", str(image.layers[-1]), *as_user, *environment, "bash", "-euc", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_image_is_found_in_two_milliseconds(image: Image) -> None:
    images = Images(Settings().data)
    took_ms = []

    for _ in range(20):
        started = time.perf_counter()
        found = images.find()
        took_ms.append((time.perf_counter() - started) * 1000)

    assert found == image
    assert sorted(took_ms)[10] < 2, took_ms


def test_a_machine_has_its_tools(image: Image) -> None:
    tools = (
        "python pip uv node npm npx bun tsc deno jupyter-lab git gcc g++ make rg jq curl wget "
        "ssh patch zip unzip xz sqlite3 Xvnc openbox xdotool xterm xclip xwd chromium"
    )

    # A root file system has no /dev/null until it is a machine.
    found = _inside(image, f"for tool in {tools}; do command -v $tool || echo no $tool; done")

    assert [line for line in found.splitlines() if line.startswith("no ")] == []


def test_node_is_recent_and_bun_runs(image: Image) -> None:
    versions = _inside(image, "node --version; bun --version").split()

    assert int(versions[0].lstrip("v").split(".")[0]) >= 22
    assert len(versions) == 2


def test_the_users_python_belongs_to_the_user(image: Image) -> None:
    said = _inside(
        image, "command -v pip; test -w /opt/venv/lib/python3*/site-packages && echo yes"
    )

    assert said.split() == ["/opt/venv/bin/pip", "yes"]


def test_both_kernels_are_registered_and_python_is_the_users(image: Image) -> None:
    kernels = image.layers[-1] / "opt/jupyter/share/jupyter/kernels"

    specs = {
        path.parent.name: json.loads(path.read_text()) for path in kernels.glob("*/kernel.json")
    }

    assert set(specs) == {"python3", "typescript"}
    assert specs["python3"]["argv"][0] == "/opt/venv/bin/python"


def test_nothing_is_setuid(image: Image) -> None:
    found = subprocess.run(
        ["find", str(image.layers[-1]), "-perm", "/6000"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout == ""


def test_nothing_of_the_building_host_is_left(image: Image) -> None:
    root = image.layers[-1]
    apt = root / "etc/apt"

    assert not (apt / "sources.list").exists()
    assert list((apt / "sources.list.d").iterdir()) == []
    assert list((root / "dev").iterdir()) == []
    assert list((root / "run").iterdir()) == []
    assert list((root / "var/lib/apt/lists").iterdir()) == []
    assert (root / "etc/resolv.conf").read_bytes() == b""
    assert (root / "etc/machine-id").read_bytes() == b""
    assert (root / "etc/hostname").read_text() == "cloche\n"
    assert list((root / "usr/local/share/ca-certificates").glob("*")) == []


def test_a_missing_image_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(ImageMissing) as caught:
        Images(tmp_path).find()

    assert "cloche image build" in caught.value.remedy


def test_the_stub_is_accepted_whole(stub: Path) -> None:
    assert Images(stub.parents[1]).find().layers[-1] == stub / "rootfs"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"digest": 5}', b"\xff\xfe"])
def test_an_unreadable_record_is_reported(stub: Path, content: bytes) -> None:
    (stub / "image.json").write_bytes(content)

    with pytest.raises(ImageCorrupt, match=r"image\.json") as caught:
        Images(stub.parents[1]).find()

    assert "--force" in caught.value.remedy


def test_another_images_record_is_reported(stub: Path) -> None:
    record = json.loads((stub / "image.json").read_text())
    (stub / "image.json").write_text(json.dumps({**record, "digest": "0" * 64}))

    with pytest.raises(ImageCorrupt, match="another image"):
        Images(stub.parents[1]).find()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 0)])
@pytest.mark.parametrize("entry", ["bin/sh", "usr/bin/python3", "opt/cloche/lib/h11/__init__.py"])
def test_a_damaged_root_is_reported(stub: Path, entry: str, damage: Callable[[Path], None]) -> None:
    damage(stub / "rootfs" / entry)

    with pytest.raises(ImageCorrupt, match=entry):
        Images(stub.parents[1]).find()


@pytest.fixture
def fresh(image: Image, tmp_path: Path) -> Path:
    """An image folder without a guest layer, on the real root file system."""
    (tmp_path / "rootfs").symlink_to(image.layers[-1])
    return tmp_path


def test_the_guest_layer_is_named_by_its_content(fresh: Path) -> None:
    sources = guest_sources()
    changed = {**sources, "opt/cloche/lib/cloche/guest/extra.py": "X = 1\n"}

    first = GuestLayer(sources).ensure(fresh)
    second = GuestLayer(changed).ensure(fresh)

    assert first != second
    assert GuestLayer(sources).ensure(fresh) == first
    assert (second / "opt/cloche/lib/cloche/guest/extra.py").read_text() == "X = 1\n"
    assert not (first / "opt/cloche/lib/cloche/guest/extra.py").exists()


def test_the_guest_layer_has_root_as_owner_and_no_package_above_the_guest(fresh: Path) -> None:
    before = os.umask(0o077)
    try:
        layer = GuestLayer(guest_sources()).ensure(fresh)
    finally:
        os.umask(before)

    for parent, _, names in os.walk(layer):
        for name in (".", *names):
            status = (Path(parent) / name).stat()
            assert (status.st_uid, status.st_gid) == (0, 0)
            assert status.st_mode & 0o777 in {0o755, 0o644}
    assert not (layer / "opt/cloche/lib/cloche/__init__.py").exists()


def test_the_guest_is_compiled_for_the_images_python(fresh: Path) -> None:
    layer = GuestLayer(guest_sources()).ensure(fresh)
    show = "import marshal, sys; print(*marshal.loads(sys.stdin.buffer.read()))"

    said = subprocess.run(
        ["chroot", str(fresh / "rootfs"), "/usr/bin/python3", "-ISc", show],
        input=(layer / "opt/cloche/lib/bundle").read_bytes(),
        capture_output=True,
        check=True,
    )

    bundled = set(said.stdout.decode().split())
    modules = {path.stem for path in (layer / "opt/cloche/lib/cloche/guest").glob("*.py")}
    assert {f"cloche.guest.{name}" for name in modules - {"__init__"}} <= bundled
    assert {"asyncio.unix_events", "json.decoder", "_ctypes"} <= bundled
    # What asyncio names and the guest does without, each with much of its own behind it.
    assert not {"logging", "inspect", "typing", "subprocess", "concurrent.futures"} & bundled


def test_many_makers_of_one_layer_end_with_one_layer(fresh: Path) -> None:
    layers = [GuestLayer(guest_sources()) for _ in range(6)]

    with ThreadPoolExecutor(len(layers)) as pool:
        made = set(pool.map(lambda layer: layer.ensure(fresh), layers))

    assert [path.name for path in made] == [layers[0].name]
    assert {path.name for path in fresh.iterdir()} == {"rootfs", layers[0].name}


def test_a_guest_that_does_not_compile_leaves_no_layer(fresh: Path) -> None:
    with pytest.raises(ImageCorrupt, match="SyntaxError"):
        GuestLayer({"opt/cloche/lib/cloche/guest/__main__.py": "def"}).ensure(fresh)

    assert [path.name for path in fresh.iterdir()] == ["rootfs"]


def _leftovers(data: Path) -> list[str]:
    """Return every mount, in any namespace, and every process that mentions `data`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            if str(data) in (process / "mountinfo").read_text():
                found.append(f"mount of {process.name}")
            if str(data) in (process / "cmdline").read_text():
                found.append(f"process {process.name}")
    return found


def _eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def _staged(data: Path) -> list[Path]:
    return list(data.glob("images/.building-*"))


def _unpacking(data: Path) -> bool:
    return any(data.glob("images/.building-*/rootfs/usr/bin"))


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """A data folder in which a build was killed while it unpacked packages."""
    builder = subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path)])
    try:
        _eventually(lambda: _unpacking(tmp_path))
    finally:
        builder.send_signal(signal.SIGKILL)
        builder.wait()
    yield tmp_path
    assert _leftovers(tmp_path) == []


def test_a_killed_build_leaves_no_process_and_no_mount(killed: Path) -> None:
    _eventually(lambda: _leftovers(killed) == [], timeout_s=5)

    assert len(_staged(killed)) == 1
    with pytest.raises(ImageMissing):
        Images(killed).find()


async def test_the_next_build_clears_up_and_a_cancelled_one_leaves_nothing(killed: Path) -> None:
    [abandoned] = _staged(killed)

    build = asyncio.create_task(Images(killed).build())
    await asyncio.to_thread(_eventually, lambda: not abandoned.exists() and _unpacking(killed))
    build.cancel()
    with pytest.raises(asyncio.CancelledError):
        await build

    assert _leftovers(killed) == []
    assert [path.name for path in (killed / "images").iterdir()] == [".lock"]


@pytest.fixture
async def building(tmp_path: Path) -> AsyncIterator[Path]:
    """A data folder in which a build is under way."""
    build = asyncio.create_task(Images(tmp_path).build())
    await asyncio.to_thread(_eventually, lambda: bool(_staged(tmp_path)))
    yield tmp_path
    build.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await build


async def test_a_second_build_waits_and_says_so(building: Path) -> None:
    said: list[Progress] = []

    second = asyncio.create_task(Images(building).build(progress=said.append))
    await asyncio.to_thread(_eventually, lambda: bool(said))
    second.cancel()

    assert said[0].step == "Waiting for another build to end"
    assert len(_staged(building)) == 1


async def test_a_failed_build_shows_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    sources = tmp_path / "sources.list"
    sources.write_text("deb [trusted=yes] http://127.0.0.1:9/debian trixie main\n")

    with pytest.raises(ImageBuildFailed) as caught:
        await Images(tmp_path / "data").build(apt_sources=sources)

    [log] = (tmp_path / "data/logs").iterdir()
    assert "127.0.0.1:9" in caught.value.message
    assert str(log) in caught.value.remedy
    assert "127.0.0.1:9" in log.read_text()
    assert [path.name for path in (tmp_path / "data/images").iterdir()] == [".lock"]


async def test_a_small_disk_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FREE_BYTES", 1 << 60)

    with pytest.raises(OperatorError, match="GiB free"):
        await Images(tmp_path).build()


async def test_building_needs_root() -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(OperatorError, match="root") as caught:
            await Images(Path("/nonexistent/cloche")).build()
    finally:
        os.seteuid(0)

    assert "sudo" in caught.value.remedy


async def test_an_image_that_is_there_is_not_built_again(image: Image) -> None:
    said: list[Progress] = []

    assert await Images(Settings().data).build(progress=said.append) == image
    assert said == []


async def test_prune_keeps_the_current_image_and_guest_alone(stub: Path) -> None:
    data = stub.parents[1]
    other = data / "images" / ("0" * 16)
    other.mkdir()
    (stub / "guest-0000000000000000").mkdir()

    removed = await Images(data).prune()

    assert set(removed) == {other.name, "guest-0000000000000000"}
    assert Images(data).find().layers[-1] == stub / "rootfs"
    assert [image.current for image in Images(data).list()] == [True]


async def test_an_image_that_machines_stand_on_is_not_removed(stub: Path) -> None:
    layers = [stub / "rootfs"]
    images = Images(stub.parents[1], used_layers=lambda: layers)

    with pytest.raises(UserError, match="Machines are running"):
        await images.remove(stub.name)
    with pytest.raises(UserError, match="Machines are running"):
        await images.build(force=True)

    layers.clear()
    assert await images.remove(stub.name[:6]) == stub.name
    assert images.list() == ()


async def test_a_living_machine_keeps_its_image(data: Path) -> None:
    host = Host.from_settings(Settings(data=data))
    image = host.image("base")

    async with await Sandbox.start_on(host.backend, SandboxSpec(disk_mib=64), image):
        assert host.backend.layers() == set(image.layers)
        with pytest.raises(UserError, match="Machines are running"):
            await host.images.remove(image.digest)

    assert host.backend.layers() == set()
    host.backend.close()


async def test_a_digest_that_names_no_image_is_the_users_mistake(stub: Path) -> None:
    for digest in ("", "zzzz"):
        with pytest.raises(ImageMissing):
            await Images(stub.parents[1]).remove(digest)
