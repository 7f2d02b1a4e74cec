"""The server over HTTP, as a client meets it: and what is left when it is killed."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from leftovers import leftovers
from serving import CLOCHE, KEY, Server, cloche

from postgres import postgres


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    server = Server(data)
    yield server
    assert server.stop() == 128 + signal.SIGTERM
    assert leftovers(data) == []


def test_a_job_is_scheduled_watched_and_downloaded(server: Server) -> None:
    job_id = server.submit(
        steps=[
            {"tool": "shell", "command": "echo hello > hello.txt; echo shown; echo bad >&2"},
            {"tool": "python", "code": "print(open('hello.txt').read(), end='')"},
        ]
    )

    status = server.end_of(job_id)

    assert (status["state"], status["status"]) == ("succeeded", "complete")
    assert (status["stdout"], status["stderr"]) == ("shown\nhello\n", "bad\n")
    assert status["rung"] == "container"
    assert server.client.get(f"/status?task_id={job_id}").json()["task_id"] == job_id
    archive = server.client.get(str(status["download_url"]))
    with zipfile.ZipFile(io.BytesIO(archive.content)) as zipped:
        assert zipped.read("hello.txt") == b"hello\n"
    part = server.client.get(str(status["download_url"]), headers={"range": "bytes=0-3"})
    assert (part.status_code, part.content) == (206, b"PK\x03\x04")
    listed = server.client.get(f"/v1/jobs/{job_id}/artifacts").json()
    assert listed == {"files": [{"path": "hello.txt", "size": 6}]}
    one = server.client.get(f"/v1/jobs/{job_id}/artifacts/hello.txt")
    assert one.content == b"hello\n"
    assert one.headers["content-disposition"] == "attachment"


def test_a_job_that_leaves_nothing_has_an_empty_zip(server: Server) -> None:
    job_id = server.submit(kind="shell", code="true")
    server.end_of(job_id)

    archive = server.client.get(f"/v1/jobs/{job_id}/artifacts.zip").content

    assert zipfile.ZipFile(io.BytesIO(archive)).namelist() == []


def test_events_stream_live_and_go_on_where_they_broke(server: Server) -> None:
    job_id = server.submit(kind="shell", code="for n in 1 2 3 4; do echo $n; sleep 0.3; done")

    first = read_events(server, job_id, until=4)
    rest = read_events(server, job_id, headers={"last-event-id": str(first[-1]["seq"])})

    numbers = [event["seq"] for event in first + rest]
    assert numbers == list(range(1, len(numbers) + 1)), "a gap or a repeat"
    assert rest[-1]["kind"] == "finished"
    assert "".join(event.get("text", "") for event in first + rest) == "1\n2\n3\n4\n"


def read_events(
    server: Server, job_id: str, *, until: int | None = None, headers: dict[str, str] | None = None
) -> list[dict[str, object]]:
    accept = {"accept": "text/event-stream", **(headers or {})}
    events: list[dict[str, object]] = []
    with server.client.stream("GET", f"/v1/jobs/{job_id}/events", headers=accept) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if until is not None and len(events) >= until:
                    break
    return events


def test_events_can_be_polled(server: Server) -> None:
    job_id = server.submit(kind="shell", code="sleep 0.5; echo late")
    began = time.monotonic()

    seen = 0
    while True:
        answer = server.client.get(f"/v1/jobs/{job_id}/events?after={seen}&wait=5").json()
        seen = answer["events"][-1]["seq"]
        if answer["events"][-1]["kind"] == "finished":
            break
        assert time.monotonic() - began < 20


def test_logs_are_read_from_any_byte(server: Server) -> None:
    job_id = server.submit(kind="shell", code="seq 1 20000")
    server.end_of(job_id)
    whole = "".join(f"{number}\n" for number in range(1, 20001)).encode()

    assert server.log(job_id) == whole
    part = server.client.get(f"/v1/jobs/{job_id}/logs?offset=50000&limit=10")
    assert part.content == whole[50000:50010]
    assert part.headers["x-log-size"] == str(len(whole))


def test_a_running_job_can_be_cancelled_and_then_deleted(server: Server) -> None:
    job_id = server.submit(kind="shell", code="sleep 60")
    assert server.client.delete(f"/v1/jobs/{job_id}").status_code == 409

    server.client.post(f"/v1/jobs/{job_id}/cancel")

    assert server.end_of(job_id)["state"] == "cancelled"
    assert server.client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert server.client.get(f"/v1/jobs/{job_id}").status_code == 404


def test_a_job_can_be_run_again(server: Server) -> None:
    job_id = server.submit(kind="shell", code="echo again", idempotency_key="once")
    server.end_of(job_id)

    again = server.client.post(f"/v1/jobs/{job_id}/retry").json()["id"]

    assert again != job_id
    assert server.end_of(again)["stdout"] == "again\n"


def test_the_same_key_answers_with_the_same_job(server: Server) -> None:
    request = {"kind": "shell", "code": "true", "idempotency_key": "k1"}
    first = server.client.post("/v1/jobs", json=request)
    second = server.client.post("/v1/jobs", json=request)
    other = server.client.post("/v1/jobs", json={**request, "code": "false"})

    assert (first.status_code, second.status_code, other.status_code) == (201, 200, 409)
    assert first.json()["id"] == second.json()["id"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"{}", "one of task"),
        (b'{"task": ""}', "task"),
        (b'{"kind": "cobol", "code": "x"}', "kind"),
        (b'{"kind": "python"}', "one of task"),
        (b'{"kind": "python", "code": ""}', "code"),
        (b'{"code": "x"}', "kind and code"),
        (b'{"kind": "python", "code": "x", "colour": 1}', "colour"),
        (b'{"kind": "python", "code": "x", "limits": {"memory_mib": -1}}', "limits.memory_mib"),
        (b'{"kind": "python", "code": "x", "limits": {"wall_s": 0}}', "limits.wall_s"),
        (b'{"kind": "python", "code": "x", "priority": 1e99}', "priority"),
        (b'{"kind": "python", "code": "a\\u0000b"}', "NUL"),
        (b'{"steps": []}', "steps"),
        (b'{"steps": [{"tool": "fly"}]}', "steps.0"),
        (b'{"steps": [{"tool": "read_file", "path": "../etc/passwd"}]}', "upwards"),
        (b'{"steps": [{"tool": "read_file", "path": "/etc/passwd"}]}', "outside"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, ""),
        (b"\xff\xfe", ""),
        (b'{"task": "Build me a todo app in React"}', "needs an agent"),
    ],
    ids=lambda value: value[:48].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_a_bad_request_is_a_problem_with_a_remedy(server: Server, body: bytes, said: str) -> None:
    before = server.client.get("/readyz").json()["jobs"]

    answer = server.client.post("/schedule", content=body)

    problem = answer.json()
    assert answer.status_code == 400, problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert said in problem["detail"]
    assert problem["code"]
    assert problem["remedy"]
    assert sum(server.client.get("/readyz").json()["jobs"].values()) == sum(before.values())


def test_a_body_that_is_too_large_is_refused(server: Server) -> None:
    answer = server.client.post("/schedule", content=b"x" * (17 * 1024 * 1024))

    assert answer.status_code == 413
    assert answer.json()["remedy"]


@pytest.mark.parametrize("job_id", ["0" * 16, "nonsense", "..%2f..%2fetc", "'; drop table jobs"])
def test_an_id_of_no_job_is_not_found(server: Server, job_id: str) -> None:
    answer = server.client.get(f"/v1/jobs/{job_id}")

    assert answer.status_code == 404
    assert answer.json()["remedy"]


@pytest.mark.parametrize("path", ["/v1/jobs", "/status/x", "/v1/keys", "/v1/audit"])
@pytest.mark.parametrize("key", [None, "wrong", "cloche_000000000000_" + "x" * 43, "ü" * 20])
def test_no_call_is_answered_without_a_key(server: Server, path: str, key: str | None) -> None:
    headers = {} if key is None else {"x-api-key": key.encode()}
    answer = httpx.get(server.client.base_url.join(path), headers=headers)

    assert answer.status_code == 401, answer.text
    assert answer.json()["code"] == "not_authenticated"


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}],
    ids=str,
)
def test_a_page_of_another_site_gets_nowhere(server: Server, headers: dict[str, str]) -> None:
    answer = server.client.get("/v1/jobs", headers=headers)

    assert answer.status_code == 403, answer.text


def test_tenants_do_not_see_each_other(server: Server) -> None:
    def key(tenant: str, role: str) -> dict[str, str]:
        answer = server.client.post("/v1/keys", json={"tenant": tenant, "role": role})
        assert answer.status_code == 201, answer.text
        return {"x-api-key": answer.json()["key"]}

    alice, bob, reader = key("alice", "member"), key("bob", "member"), key("alice", "read-only")
    request = {"kind": "shell", "code": "echo mine"}

    def call(path: str, headers: dict[str, str], method: str = "GET") -> httpx.Response:
        body = request if method == "POST" else None
        url = server.client.base_url.join(path)
        return httpx.request(method, url, headers=headers, json=body)

    def status(path: str, headers: dict[str, str], method: str = "GET") -> int:
        return call(path, headers, method).status_code

    job_id = call("/schedule", alice, "POST").json()["job_id"]
    for path in ("", "/events", "/logs", "/artifacts", "/artifacts.zip", "/artifacts/x"):
        assert status(f"/v1/jobs/{job_id}{path}", bob) == 404, path
    assert status(f"/v1/jobs/{job_id}/cancel", bob, "POST") == 404
    assert status(f"/v1/jobs/{job_id}/retry", bob, "POST") == 404
    assert status(f"/v1/jobs/{job_id}", bob, "DELETE") == 404
    assert status(f"/v1/jobs/{job_id}", alice) == status(f"/v1/jobs/{job_id}", reader) == 200
    assert status("/schedule", reader, "POST") == 403
    assert status("/v1/keys", alice) == 403
    actions = {entry["action"] for entry in server.client.get("/v1/audit").json()["entries"]}
    assert {"key.create", "job.create"} <= actions


def test_a_revoked_key_opens_nothing(server: Server) -> None:
    made = server.client.post("/v1/keys", json={"name": "short-lived"}).json()
    headers = {"x-api-key": made["key"]}
    assert httpx.get(server.client.base_url.join("/v1/jobs"), headers=headers).status_code == 200

    server.client.delete(f"/v1/keys/{made['id']}")

    assert httpx.get(server.client.base_url.join("/v1/jobs"), headers=headers).status_code == 401
    assert made["key"] not in server.client.get("/v1/keys").text


def test_health_needs_no_key_and_the_api_describes_itself(server: Server) -> None:
    base = server.client.base_url
    assert httpx.get(base.join("/healthz")).json() == {"status": "ok"}
    described = httpx.get(base.join("/openapi.json")).json()
    assert "JobRequest" in described["components"]["schemas"]
    assert "/schedule" in described["paths"]


def test_a_second_server_on_the_same_data_is_refused(server: Server) -> None:
    done = subprocess.run(
        [*CLOCHE, "serve", "--port", "0"],
        env={**os.environ, "CLOCHE_DATA": str(server.data), "CLOCHE_API_KEY": KEY},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 125
    assert "Another server or worker uses the data folder" in done.stderr


def test_a_taken_port_and_an_open_door_are_refused(server: Server, tmp_path: Path) -> None:
    def serve(*arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [*CLOCHE, "serve", *arguments],
            env={**os.environ, "CLOCHE_DATA": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 125, done.stderr
        return done.stderr

    assert "Cannot listen" in serve("--port", str(server.client.base_url.port))
    assert "let anyone" in serve("--host", "0.0.0.0", "--port", "0", CLOCHE_AUTH="off")


def test_the_command_line_runs_watches_and_downloads(server: Server, tmp_path: Path) -> None:
    archive = tmp_path / "out.zip"
    code = "print(6*7); open('left.txt', 'w').write('x')"

    done = cloche(server, "run", "--python", code, "--download", str(archive))

    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert zipfile.ZipFile(archive).namelist() == ["left.txt"]
    job_id = json.loads(cloche(server, "jobs", "--json", "--limit", "1").stdout)["jobs"][0]["id"]
    assert job_id in cloche(server, "jobs").stdout
    assert "succeeded" in cloche(server, "status", job_id).stdout
    assert cloche(server, "logs", job_id).stdout == "42\n"
    assert cloche(server, "logs", "--follow", job_id).stdout == "42\n"


def test_the_command_line_ends_as_the_job_ends(server: Server) -> None:
    assert cloche(server, "run", "--sh", "exit 3").returncode == 3
    refused = cloche(server, "run", "Build me a todo app")
    assert (refused.returncode, "needs an agent" in refused.stderr) == (2, True)
    missing = cloche(server, "status", "0" * 16)
    assert (missing.returncode, "try:" in missing.stderr) == (2, True)


def test_the_command_line_cancels_and_keeps_keys(server: Server) -> None:
    job_id = server.submit(kind="shell", code="sleep 60")
    assert cloche(server, "cancel", job_id).returncode == 0
    assert server.end_of(job_id)["state"] == "cancelled"
    made = cloche(server, "keys", "create", "--tenant", "blue", "--role", "read-only").stdout
    key_id = made.split("_")[1]
    assert key_id in cloche(server, "keys", "list").stdout
    assert cloche(server, "keys", "revoke", key_id).returncode == 0


def test_whoever_follows_a_job_does_not_hold_up_a_stop(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(tmp_path)
    job_id = server.submit(kind="shell", code="for n in $(seq 100); do echo $n; sleep 0.1; done")
    headers = {"accept": "text/event-stream"}
    with server.client.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        next(answer.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=8) == 128 + signal.SIGTERM

    server.start()
    assert server.end_of(job_id)["state"] == "succeeded"
    assert server.log(job_id).decode() == "".join(f"{n}\n" for n in range(1, 101))
    server.stop()
    assert leftovers(tmp_path) == []


def test_a_first_key_is_made_and_found_by_the_command_line(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(tmp_path, CLOCHE_API_KEY="")
    try:
        key_file = tmp_path / "api-key"
        assert key_file.stat().st_mode & 0o077 == 0, "others may read it"
        done = subprocess.run(
            [*CLOCHE, "jobs", "--json"],
            env={
                **{name: value for name, value in os.environ.items() if name != "CLOCHE_API_KEY"},
                "CLOCHE_DATA": str(tmp_path),
                "CLOCHE_URL": str(server.client.base_url),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert json.loads(done.stdout) == {"jobs": [], "next_cursor": None}, done.stderr
    finally:
        server.stop()


@pytest.mark.parametrize("seed", range(4))
def test_killing_the_server_at_any_moment_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: Path, seed: int
) -> None:
    """Acknowledged jobs all end, and a running one's output has no gap and no repeat."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "images").symlink_to(data / "images")
    chance = random.Random(seed)
    code = "import time\nfor n in range(60):\n    print(n, flush=True)\n    time.sleep(0.03)\n"
    server = Server(folder)
    acknowledged = []
    try:
        for _ in range(3):
            acknowledged.append(server.submit(kind="python", code=code))
            time.sleep(chance.random() * 0.7)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            server.start()
        for job_id in acknowledged:
            status = server.end_of(job_id)
            assert status["state"] == "succeeded", status
            whole = "".join(f"{number}\n" for number in range(60)).encode()
            assert server.log(job_id) == whole, "a gap or a repeat"
    finally:
        server.stop()
    assert leftovers(folder) == []


def test_a_server_on_postgresql_survives_a_kill_as_well(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    with postgres() as address:
        server = Server(tmp_path, CLOCHE_DATABASE=address)
        try:
            code = "for n in 1 2 3 4 5; do echo $n; sleep 0.3; done"
            job_id = server.submit(kind="shell", code=code)
            while not server.log(job_id):
                time.sleep(0.02)
            server.stop(signal.SIGKILL)
            server.start()
            status = server.end_of(job_id)
            assert (status["state"], status["stdout"]) == ("succeeded", "1\n2\n3\n4\n5\n")
        finally:
            server.stop()
    assert leftovers(tmp_path) == []
