"""The kernel's account of a machine, on v1, v2 and hybrid hosts.

A machine's cgroups are found by its id alone, so that a sweep needs no record
of a machine whose start was cut short.
"""

from __future__ import annotations

import errno
from functools import cache
from pathlib import Path

from cloche.backends.container.patience import until
from cloche.core.machine import Usage

PARENT = "cloche"
_FREEZE_S = 5.0


@cache
def hierarchies() -> dict[str, Path]:
    """Map each controller, or "" for the v2 hierarchy, to where it is mounted."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        mount_point = Path(left.split(" ")[4])
        if kind == "cgroup2":
            found[""] = mount_point
        elif kind == "cgroup":
            for option in options.split(" ")[-1].split(","):
                found[option] = mount_point
    return found


def version() -> str:
    kinds = hierarchies()
    if "memory" not in kinds:
        return "v2"
    return "hybrid" if "" in kinds else "v1"


def counts_swap() -> bool:
    """Return whether the kernel can bound swap; a limit it cannot set is an error to runc."""
    kinds = hierarchies()
    if "memory" in kinds:
        return (kinds["memory"] / "memory.memsw.limit_in_bytes").exists()
    return Path("/proc/swaps").exists()


class Cgroups:
    """Every cgroup of one machine."""

    def __init__(self, machine_id: str) -> None:
        self._folders = {
            name: mount_point / PARENT / machine_id for name, mount_point in hierarchies().items()
        }

    def _folder(self, controller: str) -> Path:
        return self._folders.get(controller) or self._folders[""]

    def exist(self) -> bool:
        return any(folder.exists() for folder in self._folders.values())

    def pids(self) -> set[int]:
        found: set[int] = set()
        for folder in set(self._folders.values()):
            try:
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.ENODEV:  # It is being removed.
                    raise
        return found

    async def freeze(self, frozen: bool) -> None:
        """Stop or wake every process, and return when the kernel says that all are."""
        if "freezer" in self._folders:
            folder = self._folders["freezer"]
            word = "FROZEN" if frozen else "THAWED"
            (folder / "freezer.state").write_text(word)
            await until(lambda: (folder / "freezer.state").read_text().strip() == word, _FREEZE_S)
        else:
            folder = self._folders[""]
            (folder / "cgroup.freeze").write_text("1" if frozen else "0")
            line = f"frozen {int(frozen)}"
            await until(lambda: line in (folder / "cgroup.events").read_text(), _FREEZE_S)

    def frozen(self) -> bool:
        if "freezer" in self._folders:
            return (self._folders["freezer"] / "freezer.state").read_text().strip() != "THAWED"
        return (self._folders[""] / "cgroup.freeze").read_text().strip() == "1"

    def bound_sockets(self, limit_bytes: int) -> None:
        """Bound what waits in sockets: v1 counts it apart from memory, with no limit by default.

        Linux 6.12 calls the file deprecated. Without it there is no such bound on v1.
        """
        if "memory" in self._folders:
            file = self._folders["memory"] / "memory.kmem.tcp.limit_in_bytes"
            if file.exists():
                file.write_text(str(limit_bytes))

    def usage(self) -> Usage:
        if "memory" in self._folders:
            memory = self._folders["memory"]
            current = _number(memory / "memory.usage_in_bytes")
            peak = _number(memory / "memory.max_usage_in_bytes")
            oom_kills = _table(memory / "memory.oom_control").get("oom_kill", 0)
            cpu_s = _number(self._folders["cpuacct"] / "cpuacct.usage") / 1e9
        else:
            memory = self._folders[""]
            current = _number(memory / "memory.current")
            peak_file = memory / "memory.peak"  # Linux 5.19
            peak = _number(peak_file) if peak_file.exists() else current
            oom_kills = _table(memory / "memory.events").get("oom_kill", 0)
            cpu_s = _table(memory / "cpu.stat").get("usage_usec", 0) / 1e6
        return Usage(
            memory_bytes=current,
            memory_peak_bytes=peak,
            cpu_s=cpu_s,
            processes=_number(self._folder("pids") / "pids.current"),
            oom_kills=oom_kills,
        )

    async def remove(self, timeout_s: float) -> None:
        """Remove the folders; the kernel lets go of an emptied one a moment later.

        Raises:
            TimeoutError: one is still in use.
        """
        for folder in set(self._folders.values()):
            await until(lambda folder=folder: _removed(folder), timeout_s)  # type: ignore[misc]


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _number(path: Path) -> int:
    return int(path.read_text())


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
