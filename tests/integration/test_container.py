"""What container machines are made of on the host, and that all of it goes with them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from leftovers import cgroups_of, leftovers

from cloche import settings
from cloche.backends import container
from cloche.backends.container.cgroups import hierarchies
from cloche.backends.container.machine import Machine
from cloche.backends.container.record import first_id, start_time
from cloche.core.errors import (
    BackendUnavailable,
    MachineNotStarted,
    NoSuchMachine,
    SandboxLost,
)
from cloche.core.image import Image
from cloche.core.spec import SandboxSpec
from cloche.sandbox.images import Images
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.maker import Maker
from cloche.testing.owner import Owner
from cloche.testing.transcript import eventually

SPEC = SandboxSpec(memory_mib=512, disk_mib=256, pids=256)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder for each test: what one leaves behind is not the next one's fault."""
    return tmp_path


@pytest.fixture(scope="module")
def image() -> Image:
    return Images(settings.load().data).find()


@pytest.fixture
async def backend(data: Path) -> AsyncIterator[container.Backend]:
    backend = container.Backend(data)
    yield backend
    backend.close()
    assert leftovers(data) == []


def processes_of(machine_id: str) -> set[int]:
    """List the machine's processes, as any of its cgroups tells them."""
    found: set[int] = set()
    for folder in hierarchies().values():
        with contextlib.suppress(OSError):
            procs = folder / "cloche" / machine_id / "cgroup.procs"
            found.update(map(int, procs.read_text().split()))
    return found


async def test_a_destroyed_machine_leaves_nothing_on_the_host(
    backend: container.Backend, image: Image, data: Path
) -> None:
    machine = await backend.create(SPEC, image)
    sandbox = Sandbox(machine)
    await sandbox.exec(["sh", "-c", "setsid sleep 1000 & head -c 30M /dev/urandom > file"])
    processes = processes_of(machine.id)
    assert len(processes) >= 2, processes
    assert len(cgroups_of({machine.id})) > 0
    assert any("backing_file" in item for item in leftovers(data)), "the disk is on a loop device"

    await machine.destroy()

    assert [pid for pid in processes if start_time(pid)] == []
    assert cgroups_of({machine.id}) == []
    assert leftovers(data) == []
    assert list((data / "machines").glob("[0-9a-f]*")) == []


async def test_nothing_is_mounted_where_the_host_could_see_it(
    backend: container.Backend, image: Image
) -> None:
    before = Path("/proc/self/mounts").read_text()

    machine = await backend.create(SPEC, image)
    during = Path("/proc/self/mounts").read_text()
    await machine.destroy()

    assert during == before


def count(kind: str) -> int:
    """Count this process's descriptors or threads."""
    return len(list(Path("/proc/self", kind).iterdir()))


async def test_many_lives_leave_no_descriptor_and_no_thread(
    backend: container.Backend, image: Image
) -> None:
    async with await Sandbox.start_on(backend, SPEC, image) as sandbox:
        await sandbox.exec(["true"])
    files, threads = count("fd"), count("task")

    for _ in range(5):
        async with await Sandbox.start_on(backend, SPEC, image) as sandbox:
            await sandbox.exec(["cat"], stdin=b"x")
            await sandbox.files.write("x", b"y")
    await asyncio.sleep(0.05)

    assert count("fd") <= files
    # asyncio's own pool grows up to its bound; one thread for each life would show.
    assert count("task") <= threads + 4


async def test_machines_start_and_end_side_by_side(
    backend: container.Backend, image: Image, data: Path
) -> None:
    async def live(number: int) -> str:
        async with await Sandbox.start_on(backend, SPEC, image) as sandbox:
            return (await sandbox.exec(["echo", str(number)])).stdout

    said = await asyncio.gather(*(live(number) for number in range(8)))

    assert said == [f"{number}\n" for number in range(8)]
    assert leftovers(data) == []


async def test_each_machine_has_user_ids_that_nobody_else_has(
    backend: container.Backend, image: Image
) -> None:
    machines = [await backend.create(SPEC, image) for _ in range(2)]
    owners = []
    for machine in machines:
        await Sandbox(machine).start(["sleep", "1000"])
        owners.append({Path(f"/proc/{pid}").stat().st_uid for pid in processes_of(machine.id)})
    for machine in machines:
        await machine.destroy()

    for machine, uids in zip(machines, owners, strict=True):
        base = first_id(machine.id)
        assert base >= 0x70000000
        assert uids <= {base, base + 1000, 0}, uids  # An undumpable process is shown as root's.
        assert base + 1000 in uids
    assert owners[0] & owners[1] <= {0}


async def test_the_kernel_holds_a_machine_to_its_spec(
    backend: container.Backend, image: Image
) -> None:
    if "memory" not in hierarchies():
        pytest.skip("reads the files of cgroup v1")
    machine = await backend.create(SandboxSpec(vcpus=1, memory_mib=300, pids=99), image)
    read = {
        name: int((hierarchies()[controller] / "cloche" / machine.id / name).read_text())
        for controller, name in [
            ("memory", "memory.limit_in_bytes"), ("pids", "pids.max"), ("cpu", "cpu.cfs_quota_us"),
            ("cpu", "cpu.cfs_period_us"),
        ]
    }  # fmt: skip
    await machine.destroy()

    assert read["memory.limit_in_bytes"] == 300 << 20
    assert read["pids.max"] == 99
    assert read["cpu.cfs_quota_us"] == read["cpu.cfs_period_us"]


async def test_memory_that_runs_out_is_told_in_the_usage(
    backend: container.Backend, image: Image
) -> None:
    async with await Sandbox.start_on(backend, SandboxSpec(memory_mib=128), image) as sandbox:
        result = await sandbox.exec(["python3", "-c", "b = b'x' * (1 << 30)"])
        usage = await sandbox.usage()

    assert (result.exit_code, result.exit.signal) == (137, 9)
    assert usage.oom_kills >= 1


async def test_a_machine_killed_from_outside_is_lost_and_can_be_cleared_away(
    backend: container.Backend, image: Image, data: Path
) -> None:
    machine = await backend.create(SPEC, image, durable=True)
    sandbox = Sandbox(machine)
    waiting = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
    await asyncio.sleep(0.2)

    os.kill(machine.record.pid, signal.SIGKILL)

    with pytest.raises(SandboxLost):
        await waiting

    async def dead() -> bool:
        return not await machine.alive()

    await eventually(dead, "the kernel to bury it", timeout_s=5)
    with pytest.raises(SandboxLost):
        await sandbox.exec(["true"])
    with pytest.raises(NoSuchMachine):
        await container.Backend(data).adopt(machine.id)
    assert leftovers(data) == [], "an adoption in vain clears away what is left"
    await machine.destroy()


async def test_a_process_id_that_was_given_anew_is_not_taken_for_the_machine(
    backend: container.Backend, image: Image
) -> None:
    machine = await backend.create(SPEC, image)
    stranger = replace(machine.record, pid=os.getpid())

    assert not await Machine(machine._folder, stranger).alive()

    await machine.destroy()


async def test_a_start_that_fails_leaves_nothing_and_says_why(
    backend: container.Backend, image: Image, data: Path
) -> None:
    broken = replace(image, layers=(Path("/no/such/layer"),))

    with pytest.raises(MachineNotStarted, match="/no/such/layer"):
        await backend.create(SPEC, broken)

    assert leftovers(data) == []


async def test_an_image_without_a_guest_is_told_in_the_runtimes_words(
    backend: container.Backend, image: Image, data: Path, tmp_path: Path
) -> None:
    hollow = replace(image, layers=image.layers[1:])

    with pytest.raises(MachineNotStarted, match=r"runc said: (?s:.*)/opt/cloche/bin/guest"):
        await backend.create(SPEC, hollow)

    assert leftovers(data) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12])
async def test_a_start_that_is_cancelled_leaves_nothing(
    backend: container.Backend, image: Image, data: Path, delay_s: float
) -> None:
    task = asyncio.create_task(backend.create(SPEC, image))
    await asyncio.sleep(delay_s)

    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await task).destroy()

    assert leftovers(data) == []


async def test_the_check_names_the_runtime_and_the_kind_of_cgroups(
    backend: container.Backend,
) -> None:
    assert (await backend.check()).startswith("runc version")
    assert "cgroup" in await backend.check()


async def test_a_host_without_a_runtime_is_told_what_to_install(data: Path, image: Image) -> None:
    bare = container.Backend(data, runtimes=["no-such-runtime"])

    for call in (bare.check(), bare.create(SPEC, image)):
        with pytest.raises(BackendUnavailable, match="no-such-runtime") as caught:
            await call
        assert "install" in caught.value.remedy


async def test_a_runtime_that_does_not_work_here_is_passed_over(data: Path, image: Image) -> None:
    backend = container.Backend(data, runtimes=["false", "runc"])

    async with await Sandbox.start_on(backend, SPEC, image) as sandbox:
        assert (await sandbox.exec(["echo", "fine"])).stdout == "fine\n"

    backend.close()
    assert leftovers(data) == []


async def test_only_root_can_start_containers(data: Path, image: Image) -> None:
    backend = container.Backend(data)
    os.seteuid(65534)
    try:
        with pytest.raises(BackendUnavailable, match="root"):
            await backend.check()
        with pytest.raises(BackendUnavailable, match="root"):
            await backend.create(SPEC, image)
    finally:
        os.seteuid(0)


async def test_a_data_folder_may_have_a_long_name(tmp_path: Path, image: Image) -> None:
    # A unix socket's address holds 107 bytes.
    data = tmp_path / ("long" * 40)
    backend = container.Backend(data)

    async with await Sandbox.start_on(backend, SPEC, image) as sandbox:
        assert (await sandbox.exec(["echo", "fine"])).stdout == "fine\n"

    backend.close()
    assert leftovers(data) == []


@pytest.mark.parametrize("harm", ["no record", "half a record", "another's record"])
async def test_a_machine_whose_record_is_damaged_is_swept(
    backend: container.Backend, image: Image, data: Path, harm: str
) -> None:
    machine = await backend.create(SPEC, image, durable=True)
    processes = processes_of(machine.id)
    record = data / "machines" / machine.id / "machine.json"
    if harm == "no record":
        record.unlink()
    else:
        record.write_text("{" if harm == "half a record" else '{"id": "x"}')

    assert await container.Backend(data).sweep() == [machine.id]

    assert [pid for pid in processes if start_time(pid)] == []
    assert leftovers(data) == []
    machine.let_go()


async def test_a_backend_that_is_closed_gives_its_machines_up(image: Image, data: Path) -> None:
    first = container.Backend(data)
    machine = await first.create(SPEC, image)
    assert await container.Backend(data).sweep() == []

    first.close()

    assert await container.Backend(data).sweep() == [machine.id]
    assert leftovers(data) == []
    assert list((data / "owners").iterdir()) == []
    machine.let_go()


async def test_many_sweeps_at_once_do_not_stand_in_each_others_way(
    image: Image, data: Path
) -> None:
    maker = Maker(factory="cloche.backends.container:Backend", data=data)
    owners = await asyncio.gather(*(Owner.start(maker, image) for _ in range(3)))
    for owner in owners:
        await owner.kill()

    swept = await asyncio.gather(*(container.Backend(data).sweep() for _ in range(5)))

    assert sorted(itertools.chain(*swept)) == sorted(owner.machine_id for owner in owners)
    assert leftovers(data) == []


async def test_a_foreign_file_among_the_machines_does_no_harm(
    backend: container.Backend, data: Path
) -> None:
    (data / "machines").mkdir(exist_ok=True)
    (data / "machines" / "README").write_text("not a machine")
    (data / "machines" / "lost+found").mkdir()

    assert await backend.sweep() == []

    (data / "machines" / "README").unlink()
    shutil.rmtree(data / "machines" / "lost+found")
