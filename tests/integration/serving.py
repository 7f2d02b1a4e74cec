"""A server process for the tests, and the command line against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

KEY = "a-key-for-the-tests"
CLOCHE = [sys.executable, "-c", "from cloche.cli import main; main()"]


class Server:
    """A server process, and a client of it."""

    def __init__(self, data: Path, **environment: str) -> None:
        self.data = data
        self._environment = {
            **os.environ,
            "CLOCHE_DATA": str(data),
            "CLOCHE_API_KEY": KEY,
            "CLOCHE_POOL_SIZE": "1",
            **environment,
        }
        self._environment = {name: value for name, value in self._environment.items() if value}
        self.start()

    def start(self) -> None:
        log = self.data / "server.log"
        offset = log.stat().st_size if log.exists() else 0
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [*CLOCHE, "serve", "--port", "0"], env=self._environment, stderr=sink
            )
        deadline = time.monotonic() + 30
        while "Cloche is at " not in (said := log.read_text()[offset:]):
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        url = said.partition("Cloche is at ")[2].partition(",")[0]
        self.client = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=30
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.client.close()
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def submit(self, **request: object) -> str:
        answer = self.client.post("/schedule", json=request)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["job_id"])

    def end_of(self, job_id: str, timeout_s: float = 60.0) -> dict[str, object]:
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.client.get(f"/status/{job_id}").json()
            if status["state"] not in ("queued", "running"):
                return dict(status)
            assert time.monotonic() < deadline, status
            time.sleep(0.02)

    def log(self, job_id: str) -> bytes:
        return self.client.get(f"/v1/jobs/{job_id}/logs").content


def cloche(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "CLOCHE_DATA": str(server.data),
        "CLOCHE_API_KEY": KEY,
        "CLOCHE_URL": str(server.client.base_url),
        "COLUMNS": "200",
    }
    return subprocess.run(
        [*CLOCHE, *arguments], env=environment, capture_output=True, text=True, check=False
    )
