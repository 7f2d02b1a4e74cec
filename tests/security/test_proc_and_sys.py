"""/proc and /sys: what they show of the host, and what can be changed through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche.sandbox.sandbox import Sandbox

from . import probe

SETTINGS = """
/proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sys/kernel/hostname
/proc/sys/kernel/sysrq /proc/sys/kernel/panic /proc/sys/kernel/pid_max /proc/sys/vm/drop_caches
/proc/sys/vm/overcommit_memory /proc/sys/fs/file-max /proc/sys/fs/binfmt_misc/register
/proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/ping_group_range /proc/sys/user/max_user_namespaces
/proc/sys/kernel/ns_last_pid /proc/sys/kernel/unprivileged_bpf_disabled
/proc/irq/default_smp_affinity /proc/acpi/wakeup /proc/bus/pci/devices /proc/mtrr /proc/timer_list
/proc/sysrq-trigger /proc/scsi/scsi /proc/kcore /proc/kmsg /proc/kallsyms
""".split()

SECRETS = """
/proc/kcore /proc/kmsg /proc/kallsyms /proc/keys /proc/modules /proc/cmdline /proc/config.gz
/proc/timer_list /proc/slabinfo /proc/vmallocinfo /proc/interrupts /proc/sched_debug
/proc/latency_stats /proc/kpagecount /proc/kpageflags /proc/kpagecgroup /proc/pagetypeinfo
/proc/sys/kernel/cap_last_cap/../../../kcore
""".split()


async def test_the_guest_is_not_listed(sandbox: Sandbox) -> None:
    listed, own, first, parent = await probe.ask(
        sandbox,
        """
        owners = {pid: os.stat("/proc/" + pid).st_uid for pid in os.listdir("/proc")
                  if pid.isdigit()}
        answer([owners, os.getpid(), attempt(os.stat, "/proc/1"),
                attempt(os.stat, f"/proc/{os.getppid()}")])
        """,
    )

    assert str(own) in listed, "the probe does not even see itself"
    assert set(listed.values()) == {1000}, listed
    assert first == parent == "ENOENT"


@pytest.mark.parametrize("name", ["environ", "mem", "maps", "fd", "root", "cwd", "exe", "cmdline"])
async def test_nothing_of_the_guest_is_readable(sandbox: Sandbox, name: str) -> None:
    found = await probe.ask(
        sandbox,
        """
        def look(pid):
            path = f"/proc/{pid}/{given['name']}"
            return [opens(path, os.O_RDONLY), attempt(os.listdir, path), attempt(os.readlink, path)]
        others = [pid for pid in (1, os.getppid(), *range(2, 60)) if pid != os.getpid()]
        answer([look("self"), {pid: look(pid) for pid in others}])
        """,
        name=name,
    )

    own, others = found
    assert "ok" in own, f"the probe cannot see even its own {name}: {own}"
    assert not {pid: said for pid, said in others.items() if "ok" in said}


async def test_no_setting_of_the_kernel_can_be_opened_for_writing(sandbox: Sandbox) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()

    found = await probe.ask(
        sandbox,
        """
        def is_null(path):
            found = os.stat(path)
            return found.st_rdev == os.makedev(1, 3)
        said = {path: opens(path, os.O_WRONLY) for path in given["paths"]}
        answer({path: word for path, word in said.items() if word == "ok" and not is_null(path)})
        """,
        paths=SETTINGS,
    )

    assert found == {}
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


async def test_nothing_in_proc_but_ones_own_processes_can_be_opened_for_writing(
    sandbox: Sandbox,
) -> None:
    opened, count = await probe.ask(
        sandbox,
        """
        opened, count = [], 0
        for folder, folders, names in os.walk("/proc"):
            if folder == "/proc":
                folders[:] = [name for name in folders if not name.isdigit()
                              and name not in ("self", "thread-self")]
            for name in names:
                path = os.path.join(folder, name)
                count += 1
                if opens(path, os.O_WRONLY) == "ok" and os.stat(path).st_rdev != os.makedev(1, 3):
                    opened.append(path)
        answer([opened, count])
        """,
    )

    assert count > 100, "the probe hardly looked"
    assert opened == []


async def test_what_the_kernel_keeps_for_root_is_empty(sandbox: Sandbox) -> None:
    found, uptime = await probe.ask(
        sandbox,
        """
        names = set(errno.errorcode.values()) | {""}
        said = {path: read(path, 4096) for path in given["paths"]}
        answer([{path: text for path, text in said.items() if text not in names},
                read("/proc/uptime")])
        """,
        paths=SECRETS,
    )

    assert float(uptime.split()[0]) > 0, "the probe cannot read anything"
    assert found == {}


async def test_physical_addresses_are_not_shown(sandbox: Sandbox) -> None:
    shown = await probe.ask(
        sandbox,
        """
        lines = (read("/proc/iomem", 1 << 20) + read("/proc/ioports", 1 << 20)).splitlines()
        answer([line for line in lines if line.split(" : ")[0].strip().strip("0-")])
        """,
    )

    assert [line for line in shown if " : " in line] == []


async def test_the_machine_cannot_map_other_users(sandbox: Sandbox) -> None:
    found = await probe.ask(
        sandbox,
        """
        def put(name, text):
            with open("/proc/self/" + name, "w") as file:
                file.write(text)
        answer({name: attempt(put, name, text) for name, text in
                (("uid_map", "0 0 1"), ("gid_map", "0 0 1"), ("setgroups", "allow"))})
        """,
    )

    assert "ok" not in found.values(), found


async def test_sys_shows_the_processors_and_the_machines_own_cgroup_alone(
    sandbox: Sandbox,
) -> None:
    found = await probe.ask(
        sandbox,
        """
        answer([sorted(os.listdir(path)) for path in
                ("/sys", "/sys/devices", "/sys/devices/system", "/sys/fs")])
        """,
    )

    assert found == [["devices", "fs"], ["system"], ["cpu"], ["cgroup"]]


async def test_nothing_in_sys_can_be_opened_for_writing(sandbox: Sandbox) -> None:
    opened, count, made = await probe.ask(
        sandbox,
        """
        opened, made, count = [], [], 0
        for folder, folders, names in os.walk("/sys"):
            if attempt(os.mkdir, os.path.join(folder, "planted")) == "ok":
                made.append(folder)
            for name in names:
                count += 1
                if opens(os.path.join(folder, name), os.O_WRONLY) == "ok":
                    opened.append(os.path.join(folder, name))
        answer([opened, count, made])
        """,
    )

    assert count > 50, "the probe hardly looked"
    assert opened == []
    assert made == []


async def test_no_release_agent_can_be_set(sandbox: Sandbox) -> None:
    """CVE-2022-0492: a cgroup v1 program that the kernel starts on the host, as root."""
    found = await probe.ask(
        sandbox,
        """
        words = ("release_agent", "notify_on_release", "cgroup.procs", "tasks", "devices.allow",
                 "memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max")
        paths = [os.path.join(folder, word) for folder, _, names in os.walk("/sys/fs/cgroup")
                 for word in words]
        answer([sum(map(os.path.exists, paths)),
                [path for path in paths if opens(path, os.O_WRONLY) == "ok"]])
        """,
    )

    assert found[0] > 0, "the probe sees no cgroup"
    assert found[1] == []
