"""The image's top-most layer: the guest's own sources.

The guest changes more often than the software around it, so it is a folder of
its own, named by the hash of its sources and made in milliseconds on demand.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cloche.core.errors import ImageCorrupt, OperatorError

_FOLDER = "opt/cloche/lib"
_BUNDLE = f"{_FOLDER}/bundle"

LAUNCHER = f"""\
#!/usr/bin/python3 -IS
import gc, marshal
gc.disable()
with open("/{_BUNDLE}", "rb") as file:
    modules = marshal.loads(file.read())
loader = {{"__name__": "cloche.guest.bundle"}}
exec(modules["cloche.guest.bundle"][2], loader)
loader["install"](modules)
from cloche.guest.__main__ import main
main()
"""

# The keeper is built by the image's own compiler, on a file system that vanishes with it.
_BUILD_KEEPER = """\
mount -t tmpfs tmpfs "$1/tmp" && exec chroot --userspec=65534:65534 "$1" /bin/sh -c '
cd /tmp && gcc -O2 -static -Wall -Wextra -Werror -x c -o keeper - >&2 && cat keeper'
"""
_COMPILE_TIMEOUT_S = 60


def guest_sources() -> dict[str, str]:
    """Return the guest's sources by their path in the machine."""
    # By its folder and not by import: nothing on the host imports the guest.
    folder = Path(__file__).resolve().parents[2] / "guest"
    return {
        f"{_FOLDER}/cloche/guest/{path.relative_to(folder)}": path.read_text("utf-8")
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c")])
    }


class GuestLayer:
    """One version of the guest, to be laid over any image."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources
        total = hashlib.sha256((LAUNCHER + _bundling()).encode())
        for path, source in sources.items():
            total.update(f"{path}\0{len(source)}\0{source}".encode())
        self.name = f"guest-{total.hexdigest()[:16]}"

    def ensure(self, image: Path) -> Path:
        """Return the layer in the folder `image`, made if it is not there.

        Raises:
            ImageCorrupt: the image's Python cannot compile the guest.
            OperatorError: the folder cannot be written.
        """
        layer = image / self.name
        if not (layer / "opt/cloche/bin/guest").is_file():
            _make(layer, self._sources, image / "rootfs")
        return layer


def _make(layer: Path, sources: dict[str, str], root: Path) -> None:
    try:
        temporary = Path(tempfile.mkdtemp(prefix=".guest-", dir=layer.parent))
    except OSError as error:
        raise OperatorError(
            f"The guest's layer cannot be written to {layer.parent}: {error.strerror}.",
            remedy="Run Cloche as the user who built the image, on a disk that has room.",
        ) from error
    try:
        _write(temporary, {path: source.encode() for path, source in sources.items()})
        modules = {path: source for path, source in sources.items() if path.endswith(".py")}
        _write(temporary, {_BUNDLE: _compiled(modules, root)})
        programs = {
            "opt/cloche/bin/guest": LAUNCHER.encode(),
            **{
                f"opt/cloche/bin/{Path(path).stem}": _built(source, root)
                for path, source in sources.items()
                if path.endswith(".c")
            },
        }
        _write(temporary, programs)
        for path in programs:
            (temporary / path).chmod(0o755)
        # An overlay shows the top-most layer's owner and mode for a folder
        # that several layers have, whatever the umask was here.
        for folder, _, _ in os.walk(temporary):
            Path(folder).chmod(0o755)
        _publish(temporary, layer)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, layer: Path) -> None:
    try:
        temporary.rename(layer)
    except OSError:
        # Another process was faster with the very same content.
        if not (layer / "opt/cloche/bin/guest").is_file():
            raise


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)


def _compiled(sources: dict[str, str], root: Path) -> bytes:
    """Return the guest and all it loads, as byte code of the Python under `root`."""
    argv = ["chroot", "--userspec=65534:65534", str(root), "/usr/bin/python3", "-IS"]
    program = ["-X", "no_debug_ranges", "-c", _bundling()]
    return _run([*argv, *program], json.dumps(sources), "Python")


def _bundling() -> str:
    return Path(__file__).with_name("bundling.py").read_text("utf-8")


def _built(source: str, root: Path) -> bytes:
    """Return a static program, from the C compiler under `root`."""
    argv = ["unshare", "--mount", "--propagation=private", "sh", "-c", _BUILD_KEEPER, "sh"]
    return _run([*argv, str(root)], source, "C compiler")


def _run(argv: list[str], text: str, what: str) -> bytes:
    try:
        done = subprocess.run(
            argv,
            input=text.encode(),
            capture_output=True,
            check=True,
            timeout=_COMPILE_TIMEOUT_S,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        said: bytes = getattr(error, "stderr", None) or b""
        reason = said.decode(errors="replace").strip() or str(error)
        raise ImageCorrupt(
            f"The image's {what} could not compile the guest: {reason}",
            remedy="Run Cloche as root; if it is, build anew: `cloche image build --force`.",
        ) from error
    return done.stdout
