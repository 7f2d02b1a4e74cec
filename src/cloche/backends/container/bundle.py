"""The OCI configuration of a machine: its walls, in one place to read."""

from __future__ import annotations

from typing import Any

from cloche.backends.container import seccomp
from cloche.core.spec import SandboxSpec

GUEST = "/opt/cloche/bin/guest"
IDS = 65536
"""User and group ids in a machine, each shifted to one that nobody on the host has."""
CPU_PERIOD_US = 100_000
TERMINALS = 64
"""The kernel has some 3000 for all machines together, and bounds no one's share by itself."""

_GUEST_CAPABILITIES = ["CAP_KILL", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID"]
"""What it takes to become uid 1000, to give the rest up for good, and to end what runs so."""

_MASKED = [
    "/proc/acpi", "/proc/asound", "/proc/cmdline", "/proc/config.gz", "/proc/interrupts",
    "/proc/kallsyms", "/proc/kcore", "/proc/keys", "/proc/kmsg", "/proc/latency_stats",
    "/proc/modules", "/proc/sched_debug", "/proc/scsi", "/proc/slabinfo", "/proc/sysrq-trigger",
    "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo",
]  # fmt: skip
_READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/pressure", "/proc/sys"]


def config(
    spec: SandboxSpec,
    *,
    machine_id: str,
    rootfs: str,
    user_namespace: str,
    first_id: int,
    memory_swap: bool,
) -> dict[str, Any]:
    """Return config.json for one machine whose ids start at `first_id` on the host."""
    memory = {"limit": spec.memory_mib << 20}
    if memory_swap:
        memory["swap"] = memory["limit"]  # Memory and swap together: no swap.
    ids = [{"containerID": 0, "hostID": first_id, "size": IDS}]
    return {
        "ociVersion": "1.0.2",
        "hostname": "cloche",
        "root": {"path": rootfs, "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0, "umask": 0o022},
            "args": [GUEST],
            "cwd": "/",
            "env": [
                "PATH=/usr/local/bin:/usr/bin:/bin",
                "LANG=C.UTF-8",
                f"CLOCHE_PIDS={spec.pids}",
            ],
            "capabilities": {
                "bounding": _GUEST_CAPABILITIES,
                "permitted": _GUEST_CAPABILITIES,
                "effective": _GUEST_CAPABILITIES,
            },
            "noNewPrivileges": True,
        },
        "mounts": _mounts(spec),
        "linux": {
            "namespaces": [
                {"type": "user", "path": user_namespace},
                *({"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network", "cgroup")),
            ],
            "uidMappings": ids,
            "gidMappings": ids,
            "cgroupsPath": f"/cloche/{machine_id}",
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}],
                "memory": memory,
                "cpu": {"period": CPU_PERIOD_US, "quota": spec.vcpus * CPU_PERIOD_US},
                "pids": {"limit": spec.pids},
            },
            "seccomp": seccomp.profile(),
            "maskedPaths": _MASKED,
            "readonlyPaths": _READ_ONLY,
        },
    }


def _mounts(spec: SandboxSpec) -> list[dict[str, Any]]:
    inert = ["nosuid", "noexec", "nodev"]
    shared_memory_mib = max(16, spec.memory_mib // 4)
    return [
        # hidepid: the user sees its own processes; the guest's, of group 0, are not there.
        # Read-only: a process could make itself the kernel's last choice of a victim, and the
        # guest its first, when memory is full. The keeper has one to write to, in root's home.
        _mount("/proc", "proc", "proc", [*inert, "ro", "hidepid=2", "gid=0"]),
        _mount("/root/proc", "proc", "proc", [*inert, "hidepid=2", "gid=0"]),
        _mount("/dev", "tmpfs", "tmpfs", ["nosuid", "noexec", "mode=755", "size=64k"]),
        _mount(
            "/dev/pts", "devpts", "devpts",
            ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", f"max={TERMINALS}"],
        ),
        _mount(
            "/dev/shm", "tmpfs", "shm",  # noqa: S108 - a place, not a file
            [*inert, "mode=1777", f"size={shared_memory_mib}m", "nr_inodes=16k"],
        ),
        # The host's /sys is not there at all but for these: runtimes count processors
        # and read their own memory limit in them.
        _mount("/sys", "tmpfs", "tmpfs", [*inert, "mode=755", "size=64k"]),
        _mount(
            "/sys/devices/system/cpu", "bind", "/sys/devices/system/cpu", ["rbind", "ro", *inert]
        ),
        _mount("/sys/fs/cgroup", "cgroup", "cgroup", ["ro", *inert]),
    ]  # fmt: skip


def _mount(target: str, kind: str, source: str, options: list[str]) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": options}
