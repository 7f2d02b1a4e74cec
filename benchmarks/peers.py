"""The peers a machine is measured beside: each runs /bin/true once, in its own way."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_S = 30.0


def peer_commands(scratch: Path, rootfs: Path) -> dict[str, list[str]]:
    """Return the command that runs /bin/true under each peer that is installed and works."""
    commands = {}
    for name in ("runc", "crun"):
        if path := shutil.which(name, path=_SEARCH):
            bundle = scratch / name
            bundle.mkdir()
            subprocess.run([path, "spec"], cwd=bundle, check=True)
            _simplify(bundle / "config.json", rootfs)
            root = str(scratch / f"{name}-state")
            commands[f"{name}_run_ms"] = [
                path, "--root", root, "run", "--bundle", str(bundle), f"bench-{name}",
            ]  # fmt: skip
    if path := shutil.which("bwrap", path=_SEARCH):
        commands["bwrap_run_ms"] = [
            path, "--unshare-all", "--ro-bind", str(rootfs), "/", "--proc", "/proc",
            "--dev", "/dev", "--die-with-parent", "/bin/true",
        ]  # fmt: skip
    return {name: argv for name, argv in commands.items() if _works(argv)}


def _works(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def _simplify(config: Path, rootfs: Path) -> None:
    value = json.loads(config.read_text())
    value["process"].update(terminal=False, args=["/bin/true"])
    value["root"] = {"path": str(rootfs), "readonly": True}
    config.write_text(json.dumps(value))


@contextlib.contextmanager
def dockerd(scratch: Path) -> Iterator[list[str] | None]:
    """Start a Docker daemon of our own; yield the command that runs /bin/true in it."""
    daemon, client = shutil.which("dockerd", path=_SEARCH), Path("/usr/bin/docker")
    if daemon is None or not client.exists():
        yield None
        return
    socket = f"unix://{scratch}/docker.sock"
    with (scratch / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(
            [
                daemon, "--host", socket, "--data-root", str(scratch / "docker"),
                "--exec-root", str(scratch / "docker-run"), "--pidfile",
                str(scratch / "docker.pid"), "--bridge=none", "--iptables=false",
            ],
            stdout=log,
            stderr=log,
        )  # fmt: skip
    docker = [str(client), "--host", socket]
    try:
        if _wait_until_up(docker, process) and _import_true(docker, scratch):
            yield [*docker, "run", "--rm", "--network", "none", "bench", "/bin/true"]
        else:
            yield None
    finally:
        process.terminate()
        process.wait(timeout=_START_S)


def _wait_until_up(docker: list[str], process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        if _works([*docker, "version"]):
            return True
        time.sleep(0.2)
    return False


def _import_true(docker: list[str], scratch: Path) -> bool:
    """Make an image of nothing but /bin/true: no registry is needed."""
    root = scratch / "true"
    listed = subprocess.run(["ldd", "/bin/true"], capture_output=True, text=True, check=True)
    needed = [word for word in listed.stdout.split() if word.startswith("/")]
    for path in ["/bin/true", *needed]:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    archive = scratch / "true.tar"
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
    return _works([*docker, "import", str(archive), "bench"])
