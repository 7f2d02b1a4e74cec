"""How fast and how small machines are, beside the peers that this host has, in one run.

    .venv/bin/python benchmarks/sandbox.py [--json] [--quick]

Every figure is taken on this host, now. A peer that is not installed is left out (null).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from figures import Figures, summary
from peers import dockerd, peer_commands

from cloche.app import Host
from cloche.core.spec import SandboxSpec
from cloche.sandbox.pool import Pool
from cloche.sandbox.sandbox import Sandbox

SMALL = SandboxSpec(memory_mib=512, disk_mib=1024)
IDLE_MACHINES = 200
OUTPUT_BYTES = 100 * 1024 * 1024


async def sample(count: int, once: Callable[[], Awaitable[float]]) -> Figures:
    return summary([await once() for _ in range(count)])


def time_command(argv: list[str], count: int) -> Figures:
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        samples.append((time.perf_counter() - began) * 1000)
    return summary(samples)


async def cold(host: Host, count: int) -> Figures:
    image = host.image("base")

    async def once() -> float:
        began = time.perf_counter()
        sandbox = await Sandbox.start_on(host.backend, SMALL, image)
        await sandbox.exec(["true"])
        took = (time.perf_counter() - began) * 1000
        await sandbox.close()
        return took

    return await sample(count, once)


async def warm(host: Host, count: int) -> Figures:
    """Claim from a pool that refills behind us, at the pace of one claim a second."""
    pool = Pool(host.backend, SMALL, host.image("base"), size=4)
    pool.start()
    samples = []
    try:
        await pool.filled()
        for _ in range(count):
            began = time.perf_counter()
            sandbox = await pool.claim()
            await sandbox.exec(["true"])
            samples.append((time.perf_counter() - began) * 1000)
            await sandbox.close()
            await pool.filled()
    finally:
        await pool.close()
    return summary(samples)


async def live(host: Host, count: int) -> Figures:
    async with await Sandbox.start_on(host.backend, SMALL, host.image("base")) as sandbox:

        async def once() -> float:
            began = time.perf_counter()
            await sandbox.exec(["true"])
            return (time.perf_counter() - began) * 1000

        await once()
        return await sample(count, once)


async def stdout_stream(host: Host) -> dict[str, float]:
    """Follow 100 MB of output; tell the rate and how much this process grew."""
    async with await Sandbox.start_on(host.backend, SMALL, host.image("base")) as sandbox:
        await sandbox.exec(["true"])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        process = await sandbox.start(["head", "-c", str(OUTPUT_BYTES), "/dev/zero"])
        received = 0
        async for chunk in process.output():
            received += len(chunk.data)
        took = time.perf_counter() - began
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if received != OUTPUT_BYTES:
        raise SystemExit(f"lost output: {received} of {OUTPUT_BYTES} bytes")
    return {
        "stdout_mb_per_s": round(OUTPUT_BYTES / 1e6 / took, 1),
        "stdout_growth_mib": round(grown_kib / 1024, 1),
    }


async def idle(host: Host, count: int) -> dict[str, Any]:
    """Hold many machines at once; tell what one weighs."""
    image = host.image("base")
    machines: list[Sandbox] = []
    began = time.perf_counter()
    try:
        while len(machines) < count:
            machines.append(await Sandbox.start_on(host.backend, SMALL, image))
        took = time.perf_counter() - began
        await asyncio.sleep(2)
        weights = [pss_mib(sandbox) for sandbox in machines]
        answers = await asyncio.gather(*(sandbox.exec(["echo", "alive"]) for sandbox in machines))
    finally:
        for sandbox in machines:
            await sandbox.close()
    return {
        "idle_pss_mib": round(statistics.mean(weights), 1),
        "idle_machines": sum(answer.stdout == "alive\n" for answer in answers),
        "idle_start_s": round(took, 1),
    }


def pss_mib(sandbox: Sandbox) -> float:
    pids = Path(f"/sys/fs/cgroup/pids/cloche/{sandbox.id}/cgroup.procs")
    if not pids.exists():
        pids = Path(f"/sys/fs/cgroup/cloche/{sandbox.id}/cgroup.procs")
    total_kib = 0
    for pid in pids.read_text().split():
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total_kib += next(int(row.split()[1]) for row in rollup.splitlines() if row[:4] == "Pss:")
    return total_kib / 1024


@contextlib.contextmanager
def quiet_progress(enabled: bool) -> Iterator[Callable[[str], None]]:
    def say(text: str) -> None:
        if enabled:
            sys.stderr.write(f"{text} …\n")

    yield say


async def measure(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    count = 10 if quick else 40
    host = Host.from_settings()
    await host.backend.sweep()
    figures: dict[str, Any] = {}
    try:
        rootfs = host.image("base").layers[-1]
        with (
            tempfile.TemporaryDirectory(prefix="cloche-bench-") as scratch,
            contextlib.ExitStack() as stack,
        ):
            commands = peer_commands(Path(scratch), rootfs)
            say("starting dockerd")
            docker = stack.enter_context(dockerd(Path(scratch)))
            if docker:
                commands["docker_run_ms"] = docker
            for name in ("runc_run_ms", "crun_run_ms", "bwrap_run_ms", "docker_run_ms"):
                say(f"measuring {name}")
                argv = commands.get(name)
                figures[name] = time_command(argv, max(10, count // 2)) if argv else None
        say("measuring cold starts")
        figures["cold_create_exec_ms"] = await cold(host, count)
        say("measuring warm starts")
        figures["warm_create_exec_ms"] = await warm(host, count * 2)
        say("measuring exec")
        figures["exec_ms"] = await live(host, count * 10)
        say("measuring output")
        figures |= await stdout_stream(host)
        say("holding idle machines")
        figures |= await idle(host, 20 if quick else IDLE_MACHINES)
    finally:
        host.backend.close()
    return figures


def print_table(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Cloche and its peers on this host")
    for column in ("what", "p50 ms", "p99 ms"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, value in figures.items():
        if isinstance(value, dict):
            table.add_row(name, f"{value['p50']:.2f}", f"{value['p99']:.2f}")
        elif value is None:
            table.add_row(name, "not here", "")
    console = Console()
    console.print(table)
    for name, value in figures.items():
        if isinstance(value, int | float):
            console.print(f"{name}: {value}")


def verdicts(figures: dict[str, Any]) -> list[str]:
    """Return the figures that miss their mark."""
    docker = figures["docker_run_ms"]
    marks = {
        "warm_create_exec_ms p50 <= 10": figures["warm_create_exec_ms"]["p50"] <= 10,
        "warm_create_exec_ms p99 <= 50": figures["warm_create_exec_ms"]["p99"] <= 50,
        "warm is 20 times faster than docker run": docker is None
        or figures["warm_create_exec_ms"]["p50"] * 20 <= docker["p50"],
        "cold_create_exec_ms p50 <= 6 x runc run": figures["runc_run_ms"] is None
        or figures["cold_create_exec_ms"]["p50"] <= 6 * figures["runc_run_ms"]["p50"],
        "exec_ms p50 <= 5": figures["exec_ms"]["p50"] <= 5,
        "100 MB of output grow the host by < 32 MiB": figures["stdout_growth_mib"] < 32,
        "idle_pss_mib <= 25": figures["idle_pss_mib"] <= 25,
    }
    return [name for name, met in marks.items() if not met]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer samples, 20 idle machines")
    arguments = parser.parse_args()
    with quiet_progress(not arguments.json or sys.stderr.isatty()) as say:
        figures = asyncio.run(measure(arguments.quick, say))
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        print_table(figures)
    for missed in verdicts(figures):
        sys.stderr.write(f"missed: {missed}\n")


if __name__ == "__main__":
    main()
