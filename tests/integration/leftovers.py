"""Looks for what a machine may leave on a host, wherever it could be."""

from __future__ import annotations

from pathlib import Path


def leftovers(data: Path) -> list[str]:
    """Return everything that still bears the mark of a machine of `data`."""
    machines = [path for path in (data / "machines").glob("*") if path.name != ".sweep"]
    found = [str(path) for path in machines]
    found += [
        f"{device}: {backing}"
        for device in Path("/sys/block").glob("loop*/loop/backing_file")
        if str(data) in (backing := _read(device))
    ]
    found += [line for line in _read(Path("/proc/self/mounts")).splitlines() if str(data) in line]
    found += [
        f"{process}: {command}"
        for process in Path("/proc").glob("[0-9]*/cmdline")
        if "runc" in (command := _read(process)) and str(data) in command
    ]
    return found


def cgroups_of(machine_ids: set[str]) -> list[str]:
    return [
        str(path)
        for pattern in ("cloche/*", "*/cloche/*")
        for path in Path("/sys/fs/cgroup").glob(pattern)
        if path.name in machine_ids
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
