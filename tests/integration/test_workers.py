"""Servers without machines, and workers without an API, on one store."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from leftovers import leftovers
from serving import CLOCHE, KEY, Server

from postgres import postgres

COUNT = "import time\nfor n in range({}):\n    print(n, flush=True)\n    time.sleep(0.05)\n"


def counted(number: int) -> str:
    return "".join(f"{n}\n" for n in range(number))


class Worker:
    """A worker process."""

    def __init__(self, data: Path, **environment: str) -> None:
        self.data = data
        self._environment = {
            **os.environ,
            "CLOCHE_DATA": str(data),
            "CLOCHE_POOL_SIZE": "1",
            **environment,
        }
        self.start()

    def start(self) -> None:
        log = self.data / "worker.log"
        offset = log.stat().st_size if log.exists() else 0
        with log.open("ab") as sink:
            self.process = subprocess.Popen([*CLOCHE, "worker"], env=self._environment, stderr=sink)
        deadline = time.monotonic() + 30
        while "It takes them from" not in (said := log.read_text()[offset:]):
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        self.banner = said
        self.name = said.partition("Worker ")[2].partition(" ")[0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@contextlib.contextmanager
def working(data: Path, **environment: str) -> Iterator[Worker]:
    worker = Worker(data, **environment)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.stop()


@contextlib.contextmanager
def door(data: Path, **environment: str) -> Iterator[Server]:
    """Run a server without machines."""
    server = Server(data, CLOCHE_SLOTS="0", **environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def until(true: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kinds(server: Server, job_id: str) -> list[str]:
    events = server.client.get(f"/v1/jobs/{job_id}/events").json()["events"]
    return [event["kind"] for event in events]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "images").symlink_to(data / "images")
    return folder


@pytest.fixture(scope="module")
def server(shared: Path) -> Iterator[Server]:
    with door(shared) as server:
        yield server


@pytest.fixture
def worker(shared: Path) -> Iterator[Worker]:
    with working(shared) as worker:
        yield worker
    assert leftovers(shared) == []


def test_a_worker_says_what_it_is_and_names_no_password(worker: Worker) -> None:
    assert "up to 4 jobs at once" in worker.banner
    assert "container rung" in worker.banner
    assert f"SQLite in {worker.data}/cloche.db" in worker.banner


def test_jobs_run_and_their_logs_and_artifacts_are_had(server: Server, worker: Worker) -> None:
    code = "echo one; sleep 0.5; echo two; echo kept > kept.txt"
    job_id = server.submit(kind="shell", code=code)

    with server.client.stream(
        "GET", f"/v1/jobs/{job_id}/events", headers={"accept": "text/event-stream"}
    ) as stream:
        told = [line for line in stream.iter_lines() if line.startswith("event:")]

    assert told[0] == "event: submitted"
    assert told[-1] == "event: finished"
    assert server.end_of(job_id)["state"] == "succeeded"
    assert server.log(job_id) == b"one\ntwo\n"
    archive = server.client.get(f"/v1/jobs/{job_id}/artifacts.zip")
    assert zipfile.ZipFile(io.BytesIO(archive.content)).read("kept.txt") == b"kept\n"


def test_a_job_is_cancelled_from_another_process(server: Server, worker: Worker) -> None:
    job_id = server.submit(kind="shell", code="echo up; sleep 98765")
    until(lambda: server.log(job_id) == b"up\n")

    server.client.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()

    assert server.end_of(job_id, 10)["state"] == "cancelled"


def test_a_job_waits_for_a_worker(server: Server) -> None:
    job_id = server.submit(kind="shell", code="echo late")
    time.sleep(1)
    assert server.client.get(f"/status/{job_id}").json()["state"] == "queued"

    with working(server.data):
        assert server.end_of(job_id)["stdout"] == "late\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_worker_goes_on_without_a_gap(
    server: Server, shared: Path, number: signal.Signals
) -> None:
    with working(shared) as worker:
        job_id = server.submit(kind="python", code=COUNT.format(80))
        until(lambda: b"5\n" in server.log(job_id))
        worker.stop(number)
        time.sleep(1)
        assert server.client.get(f"/status/{job_id}").json()["state"] == "running"
        worker.start()

        assert server.end_of(job_id)["state"] == "succeeded"
        assert server.log(job_id).decode() == counted(80), "a gap or a repeat"
        assert kinds(server, job_id).count("step") == 1, "the process was started once"
        assert kinds(server, job_id).count("retried") == 1


def test_what_is_cancelled_while_no_worker_runs_is_ended_by_the_next(
    server: Server, shared: Path
) -> None:
    with working(shared) as worker:
        job_id = server.submit(kind="shell", code="echo up; sleep 98765")
        until(lambda: server.log(job_id) == b"up\n")
        worker.stop()
        server.client.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
        worker.start()

        assert server.end_of(job_id, 10)["state"] == "cancelled"
    assert leftovers(shared) == []


def test_a_killed_server_leaves_jobs_alone(shared: Path, worker: Worker) -> None:
    with door(shared) as first:
        job_id = first.submit(kind="python", code=COUNT.format(40))
        until(lambda: b"2\n" in first.log(job_id))
        first.stop(signal.SIGKILL)
    with door(shared) as second:
        assert second.end_of(job_id)["state"] == "succeeded"
        assert second.log(job_id).decode() == counted(40)
        assert "retried" not in kinds(second, job_id)


def test_a_server_without_machines_says_so(server: Server, worker: Worker) -> None:
    ready = server.client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert (ready.json()["rung"], ready.json()["worker"], ready.json()["pool"]) == (None,) * 3
    numbers = server.client.get("/metrics").text
    assert 'rung="none"' in numbers
    assert "cloche_machines{" not in numbers
    assert "leaving machines to workers" in server.client.get("/").text

    refused = server.client.post("/v1/sandboxes", json={})
    assert (refused.status_code, refused.json()["code"]) == (503, "backend_unavailable")
    assert "keep_alive_s" in refused.json()["remedy"]
    assert server.client.get("/v1/sandboxes").json() == {"sandboxes": []}


def test_machines_of_a_worker_are_elsewhere_but_can_be_kept_and_ended(
    server: Server, worker: Worker
) -> None:
    job_id = server.submit(kind="shell", code="echo up", keep_alive_s=600)
    assert server.end_of(job_id)["state"] == "succeeded"
    [sandbox] = server.client.get("/v1/sandboxes").json()["sandboxes"]
    place = f"/v1/sandboxes/{sandbox['id']}"

    calls = [
        server.client.get(f"{place}/files/list"),
        server.client.post(f"{place}/exec", json={"argv": ["true"]}),
        server.client.get(f"/v1/jobs/{job_id}/files/list"),
    ]

    assert {(call.status_code, call.json()["code"]) for call in calls} == {
        (421, "sandbox_elsewhere")
    }
    assert worker.name in calls[0].json()["detail"]
    assert server.client.post(f"{place}/keep-alive", json={"ttl_s": 60}).status_code == 200
    assert server.client.delete(place).status_code == 204
    until(lambda: server.client.get(place).json()["state"] == "ended", 5)


def test_two_workers_share_jobs_and_each_runs_once(tmp_path: Path, data: Path) -> None:
    with postgres() as address, contextlib.ExitStack() as stack:
        shared = {"CLOCHE_DATABASE": address, "CLOCHE_BLOBS": (tmp_path / "blobs").as_uri()}
        folders = [tmp_path / name for name in ("door", "one", "two")]
        for folder in folders:
            folder.mkdir()
            (folder / "images").symlink_to(data / "images")
        server = stack.enter_context(door(folders[0], **shared))
        workers = [
            stack.enter_context(working(folder, CLOCHE_SLOTS="2", **shared))
            for folder in folders[1:]
        ]
        assert "PostgreSQL, database postgres" in workers[0].banner

        ids = [server.submit(kind="shell", code=f"sleep 0.3; echo {n}") for n in range(20)]
        ended = [server.end_of(job_id) for job_id in ids]

        assert [status["stdout"] for status in ended] == [f"{n}\n" for n in range(20)]
        took: Counter[str] = Counter()
        for job_id in ids:
            events = server.client.get(f"/v1/jobs/{job_id}/events").json()["events"]
            [started] = [event for event in events if event["kind"] == "started"]
            took[started["body"]["worker"]] += 1
        assert took.keys() == {worker.name for worker in workers}, took

        # The other worker is idle, and must not take what it has no machine for.
        job_id = server.submit(kind="python", code=COUNT.format(250))
        until(lambda: b"5\n" in server.log(job_id))
        home = server.client.get(f"/v1/jobs/{job_id}/events").json()["events"][1]["body"]["worker"]
        [holder] = [worker for worker in workers if worker.name == home]
        for number in (signal.SIGTERM, signal.SIGKILL):
            holder.stop(number)
            time.sleep(1.5)
            holder.start()
            until(lambda: kinds(server, job_id)[-1] in ("output", "finished"))
        assert server.end_of(job_id)["state"] == "succeeded"
        assert server.log(job_id).decode() == counted(250), "a gap or a repeat"
        assert kinds(server, job_id).count("step") == 1
    for folder in folders[1:]:
        assert leftovers(folder) == []


def refusal(data: Path, **environment: str) -> str:
    done = subprocess.run(
        [*CLOCHE, "worker", "--data", str(data)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (2, 125), done.stderr
    assert "Traceback" not in done.stderr
    assert "try:" in done.stderr
    return done.stderr


def test_a_worker_that_cannot_work_says_why(shared: Path, worker: Worker, tmp_path: Path) -> None:
    assert "Another server or worker uses the data folder" in refusal(shared)
    assert "image" in refusal(tmp_path / "empty")
    assert "would never take a job" in refusal(tmp_path / "none", CLOCHE_SLOTS="0")
    (tmp_path / "file").touch()
    assert "cannot be written" in refusal(tmp_path / "file/below")
    unknown = "mysql://user:hunter2@nowhere/db"
    (tmp_path / "images").symlink_to(shared / "images")
    said = refusal(tmp_path, CLOCHE_DATABASE=unknown)
    assert "CLOCHE_DATABASE" in said
    assert "hunter2" not in said


def test_up_needs_machines(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CLOCHE, "up", "--port", "0", "--data", str(tmp_path)],
        env={**os.environ, "CLOCHE_SLOTS": "0", "CLOCHE_API_KEY": KEY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 125
    assert "`cloche serve`" in done.stderr


def test_a_server_without_machines_needs_no_image_and_makes_the_first_key(tmp_path: Path) -> None:
    with door(tmp_path, CLOCHE_API_KEY="") as server:
        key = (server.data / "api-key").read_text().strip()
        url = str(server.client.base_url.join("/v1/jobs"))
        answer = httpx.get(url, headers={"authorization": f"Bearer {key}"})
        assert answer.json() == {"jobs": [], "next_cursor": None}
        assert not (server.data / "server.lock").exists()
