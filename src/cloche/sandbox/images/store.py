"""The machine images on this host: built, found, listed and removed.

    DATA/images/.lock                 held by whoever builds or removes
    DATA/images/.building-*/          a build under way, or one that was killed
    DATA/images/<digest>/rootfs/      the file system, read-only to machines
    DATA/images/<digest>/guest-<hash> the layer above it: the guest's sources
    DATA/images/<digest>/image.json   written last

A folder with a digest for a name is always whole: it is made elsewhere and
renamed in one go.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from cloche.core.errors import ImageCorrupt, ImageMissing, OperatorError
from cloche.core.image import Image
from cloche.sandbox.images import build, folders, guest, sources
from cloche.sandbox.images.build import Progress
from cloche.sandbox.images.recipe import Recipe, find_recipe

NAME = "base"
FREE_BYTES = 4 << 30
"""What a build needs on the disk, with room for the packages it unpacks."""

_FOLDERS = "[0-9a-f]" * 16
_LAYER_MADE_S = 60
_PROGRAMS = ("mmdebstrap", "unshare", "setpriv", "chroot")
_ESSENTIAL = (
    "bin/sh",
    "usr/bin/python3",
    "opt/cloche/lib/h11/__init__.py",
    "opt/venv/bin/python",
    "opt/jupyter/bin/jupyter-lab",
    "usr/local/bin/bun",
    "usr/local/bin/deno",
    "usr/bin/Xvnc",
    "home/user",
    "workspace",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What `image.json` says of a built image."""

    name: str
    digest: str
    suite: str
    architecture: str
    size_bytes: int
    built_at: str
    """RFC 3339, in UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One folder of the image store."""

    record: Record
    folder: Path
    current: bool
    """Whether it is the image of this copy's recipe."""


class Images:
    """The images under one data folder."""

    def __init__(
        self,
        data: Path,
        *,
        recipe: Recipe | None = None,
        used_layers: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        """`used_layers` tells which folders machines stand on: those are not removed."""
        self._folder = data / "images"
        self._used_layers = used_layers
        self._logs = data / "logs"
        self._recipe = recipe or find_recipe()
        # Read once: the guest of a machine must be the twin of the code in this
        # process, and `find` runs for every machine.
        self._digest = self._recipe.digest()
        self._guest = guest.GuestLayer(guest.guest_sources())

    def find(self) -> Image:
        """Return the image of this copy's recipe, with today's guest on top.

        Raises:
            ImageMissing: it has not been built.
            ImageCorrupt: something of it is damaged or gone.
        """
        folder = self._current
        if not folder.is_dir():
            raise ImageMissing(
                "The machine image has not been built on this host.",
                remedy="Build it: `cloche image build` (as root; it takes a few minutes).",
            )
        record = _read(folder)
        if record.digest != self._digest:
            raise _corrupt(folder, f"image.json is about another image, {record.digest[:16]}")
        root = folder / "rootfs"
        for entry in _ESSENTIAL:
            if not folders.is_whole(root, entry):
                raise _corrupt(folder, f"/{entry} is missing or empty")
        return Image(name=NAME, digest=self._digest, layers=(self._guest.ensure(folder), root))

    async def build(
        self,
        *,
        progress: Callable[[Progress], None] | None = None,
        force: bool = False,
        apt_sources: Path | None = None,
    ) -> Image:
        """Build the image of this copy's recipe, unless it is there, and return it.

        Raises:
            ImageBuildFailed: a step of the recipe failed; the error names the log.
            OperatorError: this host or user cannot build images.
            UserError: `force`, and machines run on the image that is there.
        """
        report = progress or _ignore
        if not force:
            with contextlib.suppress(ImageMissing):
                return await asyncio.to_thread(self.find)
        self._check_host()
        asked_at = time.time()
        async with self._lock(report) as lock:
            if not force or self._built_since(asked_at):
                with contextlib.suppress(ImageMissing):
                    return await asyncio.to_thread(self.find)
            await asyncio.to_thread(self._sweep)
            self._check_space()
            final = self._current
            folders.refuse_if_used(final, self._used_layers())
            prefix = f".building-{final.name}-"
            staging = Path(tempfile.mkdtemp(prefix=prefix, dir=self._folder))
            try:
                await self._fill(staging, lock, report, apt_sources)
                folders.refuse_if_used(final, self._used_layers())
                await asyncio.to_thread(folders.publish, staging, final)
            finally:
                await asyncio.to_thread(folders.remove_tree, staging)
        report(Progress(step="The image is ready", fraction=1.0))
        return await asyncio.to_thread(self.find)

    def list(self) -> tuple[Listed, ...]:
        """Return every image that can be read, newest first."""
        found: dict[Path, Record] = {}
        for folder in self._folders():
            with contextlib.suppress(ImageCorrupt):
                found[folder] = _read(folder)
        listed = (
            Listed(record=record, folder=folder, current=folder == self._current)
            for folder, record in found.items()
        )
        return tuple(sorted(listed, key=lambda image: image.record.built_at, reverse=True))

    async def remove(self, digest: str) -> str:
        """Remove the one image whose digest starts with `digest`; return its folder's name.

        Raises:
            ImageMissing: there is none, or more than one.
            UserError: machines run on it.
        """
        async with self._lock(_ignore):
            matches = [path for path in self._folders() if path.name.startswith(digest[:16])]
            if not digest or len(matches) != 1:
                raise ImageMissing(
                    f"{len(matches)} images have a digest that starts with {digest!r}.",
                    remedy="`cloche image list` shows the digests; give enough of one.",
                )
            folders.refuse_if_used(matches[0], self._used_layers())
            await asyncio.to_thread(folders.discard, matches[0])
        return matches[0].name

    async def prune(self) -> tuple[str, ...]:
        """Remove images of other recipes and layers of other guests, unless in use.

        Returns the names of the folders removed.
        """
        async with self._lock(_ignore):
            return await asyncio.to_thread(self._prune)

    def _prune(self) -> tuple[str, ...]:
        self._sweep()
        others = [path for path in self._folders() if path != self._current]
        layers = self._current.glob("guest-*")
        others += [path for path in layers if path.name != self._guest.name]
        used = self._used_layers()
        unused = [path for path in others if not folders.in_use(path, used)]
        for path in unused:
            folders.discard(path)
        return tuple(path.name for path in unused)

    def _folders(self) -> tuple[Path, ...]:
        return tuple(self._folder.glob(_FOLDERS))

    @property
    def _current(self) -> Path:
        return self._folder / self._digest[:16]

    def _built_since(self, moment: float) -> bool:
        """Tell whether the build that was waited for made what `force` asks for."""
        with contextlib.suppress(OSError):
            return (self._current / "image.json").stat().st_mtime > moment
        return False

    def _check_host(self) -> None:
        if os.geteuid() != 0:
            raise OperatorError(
                "Building the machine image needs root: it makes files of several owners.",
                remedy="Run it again with sudo: `sudo cloche image build`.",
            )
        for program in _PROGRAMS:
            if shutil.which(program, path=sources.PATH) is None:
                raise OperatorError(
                    f"Building the machine image needs the program `{program}`.",
                    remedy="Run `make setup`, or `apt-get install mmdebstrap util-linux`.",
                )

    def _check_space(self) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < FREE_BYTES:
            raise OperatorError(
                f"{self._folder} has {free / 2**30:.1f} GiB free; building the image needs "
                f"{FREE_BYTES / 2**30:.0f} GiB.",
                remedy="Free some space (`cloche image prune` removes old images), "
                "or move Cloche's data folder with CLOCHE_DATA.",
            )

    @contextlib.asynccontextmanager
    async def _lock(self, report: Callable[[Progress], None]) -> AsyncIterator[int]:
        """Hold the store's lock; wait for whoever has it."""
        descriptor = self._open_lock()
        try:
            waiting = False
            while not _try_lock(descriptor):
                if not waiting:
                    report(Progress(step="Waiting for another build to end", fraction=0.0))
                waiting = True
                await asyncio.sleep(0.2)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        try:
            # Machines run as other users and reach their layers through these folders.
            for folder in (self._folder.parent, self._folder):
                if not folder.is_dir():
                    folder.mkdir(parents=True, exist_ok=True)
                    folder.chmod(0o755)
            self._logs.mkdir(exist_ok=True)
            return os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OperatorError(
                f"{self._folder} cannot be written: {error.strerror}.",
                remedy="Run this as root, or set CLOCHE_DATA to a folder of your own.",
            ) from error

    def _sweep(self) -> None:
        """Remove what killed builds and removals left. The lock is held."""
        for pattern in (".building-*", ".removing-*", f"{_FOLDERS}/.removing-*"):
            for path in self._folder.glob(pattern):
                folders.remove_tree(path)
        # Layers are made without the lock, in a moment: an old one is nobody's.
        for path in self._folder.glob(f"{_FOLDERS}/.guest-*"):
            if time.time() - path.stat().st_mtime > _LAYER_MADE_S:
                folders.remove_tree(path)

    async def _fill(
        self,
        staging: Path,
        lock: int,
        report: Callable[[Progress], None],
        apt_sources: Path | None,
    ) -> None:
        recipe, root, host = self._recipe, staging / "rootfs", staging / "host"
        await asyncio.to_thread(staging.chmod, 0o755)
        environment = sources.describe(
            host,
            suite=recipe.suite,
            dump=await asyncio.to_thread(_apt_config),
            apt_sources=apt_sources,
        )
        log = self._logs / f"image-build-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.log"
        await build.run(
            recipe,
            root=root,
            host=host,
            environment=environment,
            log=log,
            lock=lock,
            report=report,
        )
        await asyncio.to_thread(folders.remove_tree, host)
        record = Record(
            name=NAME,
            digest=self._digest,
            suite=recipe.suite,
            architecture=recipe.architecture,
            size_bytes=await asyncio.to_thread(folders.size_bytes, root),
            built_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        (staging / "image.json").write_text(json.dumps(asdict(record), indent=2) + "\n", "utf-8")


def _read(folder: Path) -> Record:
    try:
        fields = json.loads((folder / "image.json").read_bytes())
        return Record(
            name=str(fields["name"]),
            digest=str(fields["digest"]),
            suite=str(fields["suite"]),
            architecture=str(fields["architecture"]),
            size_bytes=int(fields["size_bytes"]),
            built_at=str(fields["built_at"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _corrupt(folder, f"image.json cannot be read ({error})") from error


def _corrupt(folder: Path, reason: str) -> ImageCorrupt:
    return ImageCorrupt(
        f"The machine image {folder.name} is damaged: {reason}.",
        remedy="Build it anew: `cloche image build --force`.",
    )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _apt_config() -> str:
    """Return apt's settings on this host, or nothing where there is no apt."""
    try:
        done = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout


def _ignore(progress: Progress) -> None:
    """Report to nobody."""
