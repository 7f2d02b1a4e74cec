"""Lives of machines: paused and resumed, lost and found, and gone for good."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from cloche.core.errors import MachinePaused, NoSuchMachine, SandboxLost
from cloche.core.image import Image
from cloche.core.machine import Backend
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.conformance.fixtures import NewSandbox
from cloche.testing.maker import Maker
from cloche.testing.owner import Owner
from cloche.testing.transcript import Transcript, eventually

COUNTER = ["sh", "-c", "n=0; while :; do n=$((n+1)); echo $n; sleep 0.01; done"]
SPIN = ["python3", "-c", "print('up', flush=True)\nwhile True: pass"]


@pytest.mark.asyncio(loop_scope="session")
class TestPausing:
    """A paused machine stands still, and goes on as if nothing had been."""

    async def test_a_paused_machine_uses_no_processor_time(self, new_sandbox: NewSandbox) -> None:
        sandbox = await new_sandbox()
        process = await sandbox.start(SPIN)
        async with Transcript(process) as transcript:
            await transcript.until(b"up")

        await sandbox.pause()
        before = (await sandbox.usage()).cpu_s
        await asyncio.sleep(0.5)
        after = (await sandbox.usage()).cpu_s
        await sandbox.resume()

        assert after - before < 0.05, f"{after - before:.3f} s"

        async def spins() -> bool:
            return (await sandbox.usage()).cpu_s > after + 0.05

        await eventually(spins, "the process to run on", timeout_s=10)

    async def test_a_counter_stands_still_and_its_follower_misses_nothing(
        self, new_sandbox: NewSandbox
    ) -> None:
        sandbox = await new_sandbox()
        process = await sandbox.start(COUNTER)

        async with Transcript(process) as transcript:
            await transcript.until(b"\n20\n")
            await sandbox.pause()
            await asyncio.sleep(0.2)  # What was on its way arrives.
            counted = len(transcript.stdout)
            await asyncio.sleep(0.5)
            assert len(transcript.stdout) == counted, "it counted on"

            await sandbox.resume()
            last = int(transcript.stdout.split()[-1])
            await transcript.until(b"\n%d\n" % (last + 20))
            numbers = [int(word) for word in transcript.stdout.split()[:-1]]
        assert numbers == list(range(1, len(numbers) + 1))

    async def test_calls_to_a_paused_machine_say_so(self, new_sandbox: NewSandbox) -> None:
        sandbox = await new_sandbox()
        process = await sandbox.start(["sleep", "1000"])
        await sandbox.pause()

        for call in (
            sandbox.exec(["true"]), sandbox.start(["true"]), sandbox.files.read("/workspace/x"),
            sandbox.files.write("/workspace/x", b""), sandbox.processes(), process.status(),
            process.kill(), sandbox.tunnel(port=80), sandbox.attach(process.id),
        ):  # fmt: skip
            with pytest.raises(MachinePaused):
                await call

        await sandbox.resume()
        assert (await sandbox.exec(["echo", "awake"])).stdout == "awake\n"

    async def test_pause_and_resume_may_be_said_twice(self, new_sandbox: NewSandbox) -> None:
        sandbox = await new_sandbox()

        await sandbox.resume()
        await sandbox.pause()
        await sandbox.pause()
        await sandbox.resume()
        await sandbox.resume()

        assert (await sandbox.exec(["echo", "awake"])).stdout == "awake\n"

    async def test_a_command_under_way_survives_a_pause(self, new_sandbox: NewSandbox) -> None:
        sandbox = await new_sandbox()
        task = asyncio.create_task(sandbox.exec(["sh", "-c", "sleep 0.3; echo done"]))
        await asyncio.sleep(0.1)

        await sandbox.pause()
        await asyncio.sleep(0.5)
        assert not task.done()
        await sandbox.resume()

        assert (await task).stdout == "done\n"


@pytest.mark.asyncio(loop_scope="session")
class TestDestroying:
    """The end of a machine is complete, and told to whoever still waits for it."""

    async def test_a_destroyed_machine_is_lost_to_every_call(
        self, new_sandbox: NewSandbox, backend: Backend
    ) -> None:
        sandbox = await new_sandbox()
        process = await sandbox.start(["sleep", "1000"])
        await sandbox.close()

        assert not await sandbox.machine.alive()
        for call in (
            sandbox.exec(["true"]), sandbox.files.read("/workspace/x"), sandbox.processes(),
            process.status(), process.kill(), sandbox.usage(), sandbox.pause(), sandbox.resume(),
        ):  # fmt: skip
            with pytest.raises(SandboxLost):
                await call
        with pytest.raises(NoSuchMachine):
            await backend.adopt(sandbox.id)

    async def test_destroying_twice_or_at_once_is_no_error(self, new_sandbox: NewSandbox) -> None:
        sandbox = await new_sandbox()

        await asyncio.gather(sandbox.close(), sandbox.close(), sandbox.machine.destroy())
        await sandbox.close()

        assert not await sandbox.machine.alive()

    async def test_whoever_waits_for_a_command_learns_that_the_machine_is_gone(
        self, new_sandbox: NewSandbox
    ) -> None:
        sandbox = await new_sandbox()
        process = await sandbox.start(COUNTER)
        waiting = [
            asyncio.create_task(sandbox.exec(["sleep", "1000"])),
            asyncio.create_task(sandbox.exec(["sleep", "1000"], stdin=b"x" * 5_000_000)),
            asyncio.create_task(sandbox.run_code("python", "import time; time.sleep(1000)")),
            asyncio.create_task(process.wait()),
        ]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)

        await sandbox.close()

        async with asyncio.timeout(10):
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [SandboxLost] * 4, results

    async def test_a_paused_machine_can_be_destroyed(self, new_sandbox: NewSandbox) -> None:
        sandbox = await new_sandbox()
        await sandbox.start(SPIN)
        await sandbox.pause()

        async with asyncio.timeout(20):
            await sandbox.close()

        assert not await sandbox.machine.alive()

    async def test_a_machine_full_of_stubborn_processes_can_be_destroyed(
        self, new_sandbox: NewSandbox
    ) -> None:
        sandbox = await new_sandbox(SandboxSpec(pids=300))
        script = "trap '' TERM INT HUP; for n in $(seq 200); do setsid sleep 1000 & done; wait"
        await sandbox.start(["bash", "-c", script])

        async with asyncio.timeout(20):
            await sandbox.close()

        assert not await sandbox.machine.alive()


@pytest_asyncio.fixture(loop_scope="session")
async def owners(maker: Maker, image: Image) -> AsyncIterator[_Owners]:
    made = _Owners(maker, image)
    yield made
    for owner in made.started:
        await owner.kill()
        # Whatever the check came to: even a machine that it adopted and then forgot.
        with contextlib.suppress(NoSuchMachine):
            await (await maker.make().adopt(owner.machine_id)).destroy()


class _Owners:
    """Other processes with machines of their own."""

    def __init__(self, maker: Maker, image: Image) -> None:
        self.started: list[Owner] = []
        self._maker = maker
        self._image = image

    async def start(
        self,
        *,
        durable: bool = False,
        endure: bool = False,
        pause: bool = False,
        argv: Sequence[str] = (),
        cancel_after_s: Sequence[float] = (),
    ) -> Owner:
        owner = await Owner.start(
            self._maker,
            self._image,
            durable=durable,
            endure=endure,
            pause=pause,
            argv=argv,
            cancel_after_s=cancel_after_s,
        )
        self.started.append(owner)
        return owner


@pytest.mark.asyncio(loop_scope="session")
class TestOutliving:
    """Machines do not belong to the process that started them."""

    async def test_a_durable_machine_and_its_command_outlive_their_owner(
        self, maker: Maker, owners: _Owners
    ) -> None:
        owner = await owners.start(durable=True, argv=COUNTER)
        await owner.kill()

        sandbox = Sandbox(await maker.make().adopt(owner.machine_id))
        process = await sandbox.attach(owner.process_id)

        async with Transcript(process) as transcript:
            await transcript.until(b"\n10\n")
            later = int(transcript.stdout.split()[-1]) + 50
            await transcript.until(b"\n%d\n" % later)
            numbers = [int(word) for word in transcript.stdout.split()[:-1]]
        assert numbers == list(range(1, len(numbers) + 1)), "from the first byte, with no gap"
        assert (await sandbox.exec(["echo", "mine"])).stdout == "mine\n"
        assert sandbox.spec == SandboxSpec()
        await sandbox.close()
        assert not await sandbox.machine.alive()

    async def test_a_machine_can_be_made_durable_when_it_is_up(
        self, maker: Maker, owners: _Owners
    ) -> None:
        owner = await owners.start(endure=True)
        await owner.kill()

        assert await maker.make().sweep() == []

        sandbox = Sandbox(await maker.make().adopt(owner.machine_id))
        assert (await sandbox.exec(["echo", "alive"])).stdout == "alive\n"
        await sandbox.close()
        with pytest.raises(SandboxLost):
            await sandbox.machine.endure()

    async def test_the_folders_a_machine_stands_on_are_known_to_all(
        self, new_sandbox: NewSandbox, maker: Maker, image: Image
    ) -> None:
        await new_sandbox()

        assert set(image.layers) <= maker.make().layers()

    async def test_output_is_read_on_from_the_last_byte_the_dead_owner_saw(
        self, maker: Maker, owners: _Owners
    ) -> None:
        owner = await owners.start(durable=True, argv=["sh", "-c", "seq 100; sleep 1000"])
        await owner.kill()
        sandbox = Sandbox(await maker.make().adopt(owner.machine_id))
        process = await sandbox.attach(owner.process_id)

        async def written() -> bool:
            return (await process.status()).stdout_bytes == len(whole)

        whole = "".join(f"{n}\n" for n in range(1, 101)).encode()
        await eventually(written, "its output", timeout_s=10)
        async with contextlib.aclosing(process.output(stdout_from=100)) as chunks:
            chunk = await anext(chunks)

        assert (chunk.offset, chunk.data) == (100, whole[100:])
        await sandbox.close()

    async def test_a_paused_machine_is_found_paused(
        self, new_sandbox: NewSandbox, maker: Maker
    ) -> None:
        first = await new_sandbox(durable=True)
        await first.pause()

        second = Sandbox(await maker.make().adopt(first.id))

        with pytest.raises(MachinePaused):
            await second.exec(["true"])
        await second.resume()
        assert (await second.exec(["echo", "awake"])).stdout == "awake\n"

    async def test_a_machine_that_is_gone_cannot_be_adopted(
        self, new_sandbox: NewSandbox, maker: Maker
    ) -> None:
        sandbox = await new_sandbox(durable=True)
        await sandbox.close()

        with pytest.raises(NoSuchMachine):
            await maker.make().adopt(sandbox.id)

    @pytest.mark.parametrize(
        "machine_id", ["", "0123456789ab", "../owners", "/", "a\0b", "x" * 999]
    )
    async def test_a_machine_that_never_was_cannot_be_adopted(
        self, backend: Backend, machine_id: str
    ) -> None:
        with pytest.raises(NoSuchMachine):
            await backend.adopt(machine_id)

    async def test_a_machine_destroyed_by_one_handle_is_gone_for_the_other(
        self, new_sandbox: NewSandbox, maker: Maker
    ) -> None:
        first = await new_sandbox(durable=True)
        second = Sandbox(await maker.make().adopt(first.id))

        await second.close()

        assert not await first.machine.alive()
        with pytest.raises(SandboxLost):
            await first.exec(["true"])
        await first.close()

    async def test_two_handles_may_destroy_a_machine_at_once(
        self, new_sandbox: NewSandbox, maker: Maker
    ) -> None:
        first = await new_sandbox(durable=True)
        second = Sandbox(await maker.make().adopt(first.id))

        await asyncio.gather(first.close(), second.close())

        assert not await first.machine.alive()
        assert not await second.machine.alive()


@pytest.mark.asyncio(loop_scope="session")
class TestSweeping:
    """What the dead leave behind is found and taken away, and nothing else is."""

    async def test_a_dead_owners_machine_is_swept(self, maker: Maker, owners: _Owners) -> None:
        owner = await owners.start(argv=COUNTER)
        await owner.kill()

        swept = await maker.make().sweep()

        assert swept == [owner.machine_id]
        assert await maker.make().sweep() == [], "nothing is left to sweep"
        with pytest.raises(NoSuchMachine):
            await maker.make().adopt(owner.machine_id)

    async def test_the_machines_of_the_living_are_spared(
        self, maker: Maker, owners: _Owners, sandbox: Sandbox
    ) -> None:
        owner = await owners.start(argv=COUNTER)

        for keep in (None, ()):
            assert await maker.make().sweep(keep=keep) == []

        assert (await sandbox.exec(["echo", "spared"])).stdout == "spared\n"
        adopted = Sandbox(await maker.make().adopt(owner.machine_id))
        assert (await adopted.exec(["echo", "spared"])).stdout == "spared\n"
        await adopted.close()

    async def test_durable_machines_are_spared_until_they_are_not_named(
        self, maker: Maker, owners: _Owners
    ) -> None:
        wanted = await owners.start(durable=True)
        unwanted = await owners.start(durable=True)
        await wanted.kill()
        await unwanted.kill()

        assert await maker.make().sweep() == []
        assert await maker.make().sweep(keep=[wanted.machine_id]) == [unwanted.machine_id]

        adopted = Sandbox(await maker.make().adopt(wanted.machine_id))
        assert (await adopted.exec(["echo", "spared"])).stdout == "spared\n"
        await adopted.close()

    async def test_an_adopted_machine_belongs_to_the_one_who_adopted_it(
        self, maker: Maker, owners: _Owners
    ) -> None:
        owner = await owners.start(durable=True)
        backend = maker.make()
        adopted = Sandbox(await backend.adopt(owner.machine_id))
        await owner.kill()

        assert await maker.make().sweep(keep=()) == []

        assert (await adopted.exec(["echo", "mine"])).stdout == "mine\n"
        await adopted.close()

    async def test_a_paused_machine_of_the_dead_is_swept_too(
        self, maker: Maker, owners: _Owners
    ) -> None:
        owner = await owners.start(pause=True, argv=SPIN)
        await owner.kill()

        async with asyncio.timeout(20):
            assert await maker.make().sweep() == [owner.machine_id]

    async def test_a_start_that_was_cancelled_left_nothing_to_sweep(
        self, maker: Maker, owners: _Owners, time_scale: float
    ) -> None:
        delays_s = [delay_s * time_scale for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.2)]
        owner = await owners.start(cancel_after_s=delays_s)
        await owner.kill()

        assert await maker.make().sweep() == [owner.machine_id], "only the one that came up"
