"""How fast jobs go through a server, beside a bare interpreter on the same host, in one run.

    .venv/bin/python benchmarks/jobs.py [--json] [--quick]

The server is a real one, in a process and a data folder of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from figures import summary

from cloche import settings

KEY = "a-key-for-the-benchmark"
PARALLEL = 4
CODE = "print(6*7)"


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    with tempfile.TemporaryDirectory(prefix="cloche-bench-") as folder:
        data = Path(folder)
        (data / "images").symlink_to(settings.load().data / "images")
        environment = {
            **os.environ,
            "CLOCHE_DATA": folder,
            "CLOCHE_API_KEY": KEY,
            "CLOCHE_POOL_SIZE": str(PARALLEL),
            "CLOCHE_SLOTS": str(PARALLEL),
        }
        with (data / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / "cloche"), "serve", "--port", "0"],
                env=environment,
                stderr=log,
            )
        try:
            while "Cloche is at " not in (said := (data / "log").read_text()):
                if process.poll() is not None:
                    raise SystemExit(said)
                await asyncio.sleep(0.05)
            url = said.partition("Cloche is at ")[2].partition(",")[0]
            headers = {"authorization": f"Bearer {KEY}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
                await asyncio.sleep(2)  # The pool fills.
                yield client, process.pid
        finally:
            process.terminate()
            process.wait(timeout=60)


async def submit(client: httpx.AsyncClient) -> str:
    answer = await client.post("/schedule", json={"kind": "python", "code": CODE})
    answer.raise_for_status()
    return str(answer.json()["job_id"])


async def latency(client: httpx.AsyncClient, count: int) -> dict[str, float]:
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        job_id = await submit(client)
        job = (await client.get(f"/v1/jobs/{job_id}?wait=60")).json()
        if job["state"] != "succeeded":
            raise SystemExit(f"a job did not succeed: {job}")
        samples.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.3)
    return summary(samples)


def bare(count: int) -> tuple[dict[str, float], float]:
    """Run the same line under the host's own interpreter, alone and `PARALLEL` at a time."""
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run(["/usr/bin/python3", "-c", CODE], check=True, stdout=subprocess.DEVNULL)
        samples.append((time.perf_counter() - began) * 1000)
    began = time.perf_counter()
    script = f"seq {count * 10} | xargs -P {PARALLEL} -I_ /usr/bin/python3 -c '{CODE}'"
    subprocess.run(["sh", "-c", script], check=True, stdout=subprocess.DEVNULL)
    return summary(samples), count * 10 / (time.perf_counter() - began)


async def burst(client: httpx.AsyncClient, pid: int, count: int) -> dict[str, Any]:
    """Submit many jobs at once; ask for statuses meanwhile; count what is lost."""
    before = resident_mib(pid)
    began = time.perf_counter()
    limit = asyncio.Semaphore(50)

    async def one() -> str:
        async with limit:
            return await submit(client)

    ids = await asyncio.gather(*(one() for _ in range(count)))
    samples: list[float] = []
    while True:
        asked = time.perf_counter()
        await client.get(f"/status/{ids[len(samples) % count]}")
        samples.append((time.perf_counter() - asked) * 1000)
        ready = (await client.get("/readyz")).json()["jobs"]
        if not ready["queued"] and not ready["running"]:
            break
        await asyncio.sleep(0.05)
    took = time.perf_counter() - began
    states = [(await client.get(f"/v1/jobs/{job_id}")).json()["state"] for job_id in ids]
    return {
        "jobs_per_s": round(count / took, 2),
        "burst_lost": sum(state != "succeeded" for state in states),
        "status_p99_ms": summary(samples)["p99"],
        "server_growth_mib": round(resident_mib(pid) - before, 1),
    }


async def large(client: httpx.AsyncClient, pid: int) -> dict[str, Any]:
    """Pass a 200 MB log and a 1 GB artifact through; tell by how much the server grew at most."""
    figures: dict[str, Any] = {}
    for name, code, path in (
        ("log_200mb", "yes 0123456789abcde | head -c 200000000", "logs"),
        ("artifact_1gb", "head -c 1000000000 /dev/urandom > big.bin", "artifacts.zip"),
    ):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # The peak is counted from here.
        before = resident_mib(pid)
        began = time.perf_counter()
        answer = await client.post("/v1/jobs", json={"kind": "shell", "code": code})
        url = f"/v1/jobs/{answer.json()['id']}"
        while (job := (await client.get(url)).json())["state"] in ("queued", "running"):
            await asyncio.sleep(0.2)
        ran = time.perf_counter() - began
        received = 0
        while True:
            query = {"offset": received} if path == "logs" else None
            more = 0
            async with client.stream("GET", f"{url}/{path}", params=query) as body:
                async for data in body.aiter_bytes():
                    more += len(data)
            received += more
            if path != "logs" or not more:
                break
        figures[name] = {
            "state": job["state"],
            "run_s": round(ran, 1),
            "read_s": round(time.perf_counter() - began - ran, 1),
            "bytes": received,
            "peak_growth_mib": round(resident_mib(pid, "VmHWM") - before, 1),
        }
    return figures


def resident_mib(pid: int, name: str = "VmRSS") -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in status if row.startswith(f"{name}:")) / 1024


async def measure(quick: bool) -> dict[str, Any]:
    count = 20 if quick else 50
    bare_ms, bare_per_s = bare(count)
    figures: dict[str, Any] = {"bare_ms": bare_ms, "bare_per_s": round(bare_per_s, 1)}
    async with serving() as (client, pid):
        figures["job_latency_ms"] = await latency(client, count)
        figures |= await burst(client, pid, 100 if quick else 1000)
        figures |= await large(client, pid)
    figures["ratio"] = round(figures["jobs_per_s"] / figures["bare_per_s"], 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer samples, a burst of 100")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.quick))
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:>20}: {value}")


if __name__ == "__main__":
    main()
