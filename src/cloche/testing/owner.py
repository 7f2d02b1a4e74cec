"""Another process that owns a machine, to be killed without a chance to tidy up.

It stands for a server that dies: `Owner` is our handle on it, `main` what it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cloche.core.image import Image
from cloche.core.machine import Backend
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.maker import Maker


class Owner:
    """A living process with one machine, and perhaps one command in it."""

    def __init__(self, process: Process, machine_id: str, process_id: str | None) -> None:
        self.machine_id = machine_id
        self.process_id = process_id or ""
        self._process = process

    @classmethod
    async def start(
        cls,
        maker: Maker,
        image: Image,
        *,
        durable: bool = False,
        endure: bool = False,
        pause: bool = False,
        argv: Sequence[str] = (),
        cancel_after_s: Sequence[float] = (),
    ) -> Owner:
        """Start a process that makes a machine and runs `argv` in it, if there is any.

        With `endure`, the machine is made durable only after it is up. `cancel_after_s` are
        starts of other machines that the process gives up, each after that many seconds.
        """
        order = {
            "factory": maker.factory,
            "data": str(maker.data),
            "image": {**asdict(image), "layers": [str(layer) for layer in image.layers]},
            "durable": durable,
            "endure": endure,
            "pause": pause,
            "argv": list(argv),
            "cancel_after_s": list(cancel_after_s),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, json.dumps(order), stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        if process.stdout is None or process.stderr is None:
            raise AssertionError("unreachable: both were asked for")
        line = await process.stdout.readline()
        if not line:
            said = (await process.stderr.read()).decode(errors="replace")
            await process.wait()
            raise AssertionError(f"the owner did not come up: {said}")
        told = json.loads(line)
        return cls(process, told["machine"], told["process"])

    async def kill(self) -> None:
        """End it as a power cut would, and return when it is dead. Idempotent."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


async def _own(order: dict[str, Any]) -> None:
    backend = Maker(factory=order["factory"], data=Path(order["data"])).make()
    layers = tuple(map(Path, order["image"]["layers"]))
    image = Image(**{**order["image"], "layers": layers})
    for delay_s in order["cancel_after_s"]:
        await _start_in_vain(backend, image, delay_s)
    sandbox = await Sandbox.start_on(backend, SandboxSpec(), image, durable=order["durable"])
    if order["endure"]:
        await sandbox.machine.endure()
    process = await sandbox.start(order["argv"]) if order["argv"] else None
    if order["pause"]:
        await sandbox.pause()
    told = {"machine": sandbox.id, "process": process.id if process else None}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    # Should the checks die before they kill us, our input ends, and so do we.
    await asyncio.to_thread(sys.stdin.buffer.read)


async def _start_in_vain(backend: Backend, image: Image, delay_s: float) -> None:
    start = asyncio.create_task(Sandbox.start_on(backend, SandboxSpec(), image))
    await asyncio.sleep(delay_s)
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await start).close()


def main() -> None:
    asyncio.run(_own(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
