"""The host's files: nothing inside names, reads or reaches one."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from pathlib import Path

import pytest

from cloche.core.errors import CommandNotStarted
from cloche.core.image import Image
from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

ROUTES = (
    "{}", "/proc/1/root{}", "/proc/1/cwd{}", "/proc/self/root{}", "/proc/self/root/../..{}",
    "/proc/self/cwd/../../../../../..{}", "/../../../../../../../..{}", "/proc/thread-self/root{}",
    "/dev/fd/../../../../../..{}", "/run/cloche{}",
)  # fmt: skip
"""Ways to spell a host path that have worked in one container runtime or another."""


@pytest.fixture
def secret(data: Path) -> tuple[Path, str]:
    """A file that everyone on the host may read, beside the machine's own folder."""
    token = secrets.token_hex(16)
    path = data / f"secret-{token[:8]}"
    path.write_text(token)
    path.chmod(0o644)
    return path, token


async def test_a_secret_in_the_data_folder_cannot_be_read(
    sandbox: Sandbox, secret: tuple[Path, str]
) -> None:
    path, token = secret
    await sandbox.files.write("/workspace/own", token)
    routes = [route.format(path) for route in ROUTES]

    found = await probe.ask(
        sandbox,
        "answer({path: read(path) for path in given['paths']})",
        paths=[*routes, "/workspace/own"],
    )

    assert found.pop("/workspace/own") == token, "the probe cannot read even its own file"
    assert not [path for path, text in found.items() if token in text], found


async def test_the_hosts_shadow_is_not_the_machines(sandbox: Sandbox) -> None:
    inside = await probe.ask(
        sandbox, "answer([read('/etc/shadow'), os.stat('/etc/shadow').st_size])"
    )
    seen = probe.seen_from_host(sandbox, "/etc/shadow").stat()
    host = Path("/etc/shadow").stat()

    assert inside[0] == "EACCES", "the machine's user reads a shadow file"
    assert (seen.st_dev, seen.st_ino) != (host.st_dev, host.st_ino)


async def test_a_file_handle_is_not_opened(sandbox: Sandbox, numbers: dict[str, int]) -> None:
    """The "Shocker" attack: guess the handle of the host's root folder, inode 2."""
    made, opened = await probe.ask(
        sandbox,
        """
        root = ctypes.create_string_buffer(struct.pack("IiII", 8, 1, 2, 0), 64)
        real = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 160)
        mount = ctypes.byref(ctypes.c_int())
        made = call(given["name_to_handle_at"], -100, b"/dev/shm", real, mount, 0)
        folders = [os.open(path, os.O_RDONLY) for path in ("/", "/dev/shm")]
        answer([made, [call(given["open_by_handle_at"], folder, handle, os.O_RDONLY)
                       for folder in folders for handle in (root, real)]])
        """,
        **{name: numbers[name] for name in ("name_to_handle_at", "open_by_handle_at")},
    )

    assert made == "ok", "the probe cannot even make a handle"
    assert set(opened) == {"EPERM"}


async def test_the_machine_is_not_told_where_it_lives(
    sandbox: Sandbox, data: Path, image: Image
) -> None:
    told = await probe.ask(
        sandbox,
        "answer({name: read('/proc/self/' + name, 1 << 20) for name in "
        "('mountinfo', 'mounts', 'mountstats', 'maps', 'cgroup', 'environ')})",
    )

    assert " / / " in told["mountinfo"], "the probe sees no mounts"
    for words in (str(data), str(image.layers[-1].parent), sandbox.id):
        assert not [name for name, text in told.items() if words in text], f"{words} in {told}"


async def test_no_process_of_a_machine_holds_a_file_of_the_host(
    sandbox: Sandbox, data: Path, image: Image
) -> None:
    """What CVE-2024-21626 leaked: a descriptor, or a folder, from before the walls stood."""
    running = await sandbox.start(["sleep", "60"])
    host = {path.stat().st_dev for path in (Path("/"), Path("/sys"), data, *image.layers)}
    held = {}
    for pid in probe.pids(sandbox):
        proc = Path(f"/proc/{pid}")
        for link in (proc / "cwd", proc / "root", proc / "exe", *(proc / "fd").iterdir()):
            try:
                found = link.stat()
            except FileNotFoundError:  # A descriptor that was closed since.
                continue
            if found.st_dev in host and not stat.S_ISCHR(found.st_mode):
                held[str(link)] = str(link.readlink())
    await running.kill()

    assert not held


@pytest.mark.parametrize(
    "folder",
    [*(f"/proc/self/fd/{number}" for number in range(3, 16)), "/proc/1/cwd", "/proc/1/root"],
)
async def test_no_descriptor_leads_a_command_out(sandbox: Sandbox, folder: str) -> None:
    """CVE-2024-21626 again: the working folder is opened while the parent still holds its own."""
    with pytest.raises(CommandNotStarted):
        await sandbox.exec(["pwd", "-P"], cwd=folder, timeout_s=5)


async def test_the_runtime_and_the_interpreter_are_not_overwritten(
    make_sandbox: MakeSandbox, image: Image
) -> None:
    """CVE-2019-5736: through /proc/PID/exe, the program that started the machine."""
    runtime = shutil.which("runc") or shutil.which("crun") or ""
    files = [Path(runtime), *(layer / "usr/bin/python3" for layer in image.layers)]
    before = {path: _digest(path) for path in files if path.exists()}
    assert len(before) >= 2
    sandbox = await make_sandbox()

    found = await probe.ask(
        sandbox,
        """
        own = os.open("/proc/self/exe", os.O_PATH)
        paths = [f"/proc/{pid}/exe" for pid in ("self", "thread-self", os.getppid(), *range(1, 40))]
        answer({path: opens(path, os.O_WRONLY) for path in [*paths, f"/proc/self/fd/{own}"]})
        """,
    )

    assert "ok" not in found.values(), found
    assert {path: _digest(path) for path in before} == before
    assert await probe.answers(sandbox)


async def test_what_a_machine_writes_stays_in_it(make_sandbox: MakeSandbox, image: Image) -> None:
    """Machines share the image's folders; one that could write there would own the next."""
    first, second = await make_sandbox(), await make_sandbox()
    name = f"planted-{secrets.token_hex(4)}"
    written = await probe.shell(
        first,
        f"echo x > /opt/venv/bin/{name} && echo '# {name}' >> /opt/venv/pyvenv.cfg "
        f"&& echo x > /home/user/{name} && cat /opt/venv/pyvenv.cfg",
    )

    assert name in written, f"the probe could not write: {written}"
    assert name not in await probe.shell(second, "ls /opt/venv/bin /home/user; cat /opt/venv/*.cfg")
    for layer in image.layers:
        assert not (layer / "opt/venv/bin" / name).exists()
        assert not (layer / "home/user" / name).exists()


async def test_the_hosts_environment_does_not_come_along(
    make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = secrets.token_hex(16)
    monkeypatch.setenv("CLOCHE_TEST_API_KEY", token)
    sandbox = await make_sandbox()
    running = await sandbox.start(["sleep", "60"], env={"GIVEN": "yes"})
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in probe.pids(sandbox)}
    await running.kill()

    assert any(b"GIVEN=yes" in text for text in environments.values()), environments
    leaked = {pid: text for pid, text in environments.items() if token.encode() in text}
    assert not leaked
    assert token in os.environ["CLOCHE_TEST_API_KEY"]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.resolve().read_bytes()).hexdigest()
