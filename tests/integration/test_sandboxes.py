"""Sandboxes without a job, and the files of jobs, over HTTP."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from leftovers import leftovers
from serving import Server, cloche


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    server = Server(data)
    yield server
    for sandbox in server.client.get("/v1/sandboxes").json()["sandboxes"]:
        server.client.delete(f"/v1/sandboxes/{sandbox['id']}")
    assert server.stop() == 128 + signal.SIGTERM
    assert leftovers(data) == []


def make(server: Server, **order: object) -> str:
    answer = server.client.post("/v1/sandboxes", json=order)
    assert answer.status_code == 201, answer.text
    return f"/v1/sandboxes/{answer.json()['id']}"


@pytest.fixture
def box(server: Server) -> Iterator[str]:
    url = make(server, env={"COLOUR": "blue"})
    yield url
    assert server.client.delete(url).status_code == 204


def run(server: Server, url: str, **wanted: object) -> dict[str, Any]:
    answer = server.client.post(f"{url}/exec", json=wanted)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(answer: httpx.Response) -> Iterator[tuple[str, str, dict[str, Any]]]:
    event_id = name = ""
    for line in answer.iter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield event_id, name, json.loads(line[6:])


def wait_for_end(server: Server, url: str, timeout_s: float = 10.0) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while (view := server.client.get(url).json())["state"] != "ended":
        assert time.monotonic() < deadline, view
        time.sleep(0.05)
    return dict(view)


def test_a_command_answers_with_what_it_did(server: Server, box: str) -> None:
    done = run(server, box, command="echo $COLOUR $MORE; echo bad >&2; exit 3", env={"MORE": "x"})

    assert (done["exit_code"], done["stdout"], done["stderr"]) == (3, "blue x\n", "bad\n")
    assert run(server, box, argv=["cat"], stdin="fed")["stdout"] == "fed"
    assert run(server, box, argv=["pwd"], cwd="/tmp")["stdout"] == "/tmp\n"


def test_output_is_bounded_and_the_rest_can_be_read(server: Server, box: str) -> None:
    done = run(server, box, command="yes | head -c 100000", max_output_bytes=1000)

    assert (len(done["stdout"]), done["truncated"]) == (1000, True)
    with server.client.stream(
        "GET", f"{box}/processes/{done['process']}/output?stdout=1000"
    ) as answer:
        rest = "".join(data.get("text", "") for _, _, data in events(answer))
    assert len(rest) == 99000


def test_a_command_that_takes_too_long_is_killed_and_told_of(server: Server, box: str) -> None:
    done = run(server, box, argv=["sleep", "60"], timeout_s=0.3)

    assert done["timed_out"] is True
    assert done["duration_s"] < 5


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "print(6*7)"),
        ("typescript", "const n: number = 42; console.log(n)"),
        ("javascript", "console.log(42)"),
        ("bash", "echo 42"),
    ],
)
def test_code_runs_in_each_language(server: Server, box: str, language: str, code: str) -> None:
    answer = server.client.post(f"{box}/code", json={"language": language, "code": code})

    assert answer.json()["stdout"] == "42\n", answer.text


def test_output_streams_as_it_comes_and_no_character_is_broken(server: Server, box: str) -> None:
    code = (
        "import sys, time\n"
        "for byte in 'é€😀'.encode() * 20:\n"
        "    sys.stdout.buffer.write(bytes([byte])); sys.stdout.flush(); time.sleep(0.005)\n"
    )
    began = time.monotonic()
    headers = {"accept": "text/event-stream"}
    body = {"language": "python", "code": code}
    with server.client.stream("POST", f"{box}/code", json=body, headers=headers) as answer:
        seen = [(time.monotonic() - began, name, data) for _, name, data in events(answer)]

    assert [name for _, name, _ in (seen[0], seen[-1])] == ["started", "exit"]
    texts = [data["text"] for _, name, data in seen if name == "output"]
    assert "".join(texts) == "é€😀" * 20
    first = next(at for at, name, _ in seen if name == "output")
    assert seen[-1][0] - first > 0.5, "it came all at once"


def test_a_stream_that_broke_goes_on_where_it_was(server: Server, box: str) -> None:
    body = {"command": "for n in $(seq 30); do echo $n; sleep 0.02; done", "background": True}
    started = server.client.post(f"{box}/exec", json=body)
    assert started.status_code == 202
    url = f"{box}/processes/{started.json()['id']}/output"
    seen, last = "", "0:0"
    with server.client.stream("GET", url) as answer:
        for event_id, name, data in events(answer):
            if name == "output":
                seen, last = seen + data["text"], event_id
                if len(seen) > 20:
                    break
    with server.client.stream("GET", url, headers={"last-event-id": last}) as answer:
        seen += "".join(data.get("text", "") for _, _, data in events(answer))

    assert seen == "".join(f"{n}\n" for n in range(1, 31))


def test_a_background_process_is_fed_signalled_and_killed(server: Server, box: str) -> None:
    def status(process_id: str) -> dict[str, Any]:
        return dict(server.client.get(f"{box}/processes/{process_id}").json())

    def start(**wanted: object) -> str:
        body = {**wanted, "background": True}
        return str(server.client.post(f"{box}/exec", json=body).json()["id"])

    cat, trap, sleep = (
        start(argv=["cat"]),
        start(command="trap 'echo caught; exit 5' TERM; while :; do sleep 0.05; done"),
        start(argv=["sleep", "60"]),
    )
    listed = {one["id"] for one in server.client.get(f"{box}/processes").json()["processes"]}
    assert {cat, trap, sleep} <= listed
    fed = server.client.post(f"{box}/processes/{cat}/stdin?close=true", content=b"some input")
    assert fed.status_code == 204, fed.text
    with server.client.stream("GET", f"{box}/processes/{cat}/output") as answer:
        assert [d["text"] for _, n, d in events(answer) if n == "output"] == ["some input"]
    time.sleep(0.2)
    server.client.post(f"{box}/processes/{trap}/signal", json={"number": 15})
    with server.client.stream("GET", f"{box}/processes/{trap}/output") as answer:
        assert list(events(answer))[-1][2]["exit_code"] == 5
    assert server.client.delete(f"{box}/processes/{sleep}").status_code == 204
    assert status(sleep)["signal"] == 9


def test_files_are_written_read_listed_moved_and_removed(server: Server, box: str) -> None:
    files = f"{box}/files"
    blob = bytes(range(256)) * 4096
    put = server.client.put(files, params={"path": "a/b.bin", "mode": 0o755}, content=blob)
    assert put.status_code == 204, put.text

    assert server.client.get(files, params={"path": "a/b.bin"}).content == blob
    assert server.client.get(files, params={"path": "a/b.bin", "offset": 256}).content == blob[256:]
    listed = server.client.get(f"{files}/list", params={"path": "a"}).json()["entries"]
    assert [(one["path"], one["size"]) for one in listed] == [("/workspace/a/b.bin", len(blob))]
    assert server.client.get(f"{files}/stat", params={"path": "a/b.bin"}).json()["mode"] == 0o755
    server.client.post(f"{files}/folder", json={"path": "c/d"})
    server.client.post(f"{files}/move", json={"path": "a/b.bin", "to": "c/d/e.txt"})
    server.client.put(files, params={"path": "c/text"}, content="needle in hay\n")
    found = server.client.get(f"{files}/glob", params={"pattern": "**/*.txt"}).json()["paths"]
    assert found == ["/workspace/c/d/e.txt"]
    matches = server.client.get(f"{files}/grep", params={"pattern": "needle"}).json()["matches"]
    assert [one["path"] for one in matches] == ["/workspace/c/text"]
    assert server.client.delete(files, params={"path": "c"}).status_code == 400
    assert server.client.delete(files, params={"path": "c", "recursive": True}).status_code == 204
    assert server.client.get(f"{files}/stat", params={"path": "c"}).status_code == 404


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../etc/passwd", "/proc/1/environ", "x" * 5000, "", "link/passwd"]
)
def test_a_path_that_leads_out_is_refused(server: Server, box: str, path: str) -> None:
    run(server, box, argv=["ln", "-sfn", "/etc", "link"])

    for answer in (
        server.client.get(f"{box}/files", params={"path": path}),
        server.client.put(f"{box}/files", params={"path": path}, content=b"x"),
        server.client.delete(f"{box}/files", params={"path": path}),
        server.client.get(f"{box}/files/archive", params={"path": path}),
        server.client.put(f"{box}/files/archive", params={"path": path}, content=b"x"),
    ):
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["remedy"]


def test_a_folder_comes_as_a_zip_or_tar_and_goes_in_as_one(server: Server, box: str) -> None:
    run(
        server, box, command="mkdir -p in/deep; echo one > in/1; echo two > in/deep/2; ln -s / in/l"
    )
    archive = f"{box}/files/archive"

    zipped = server.client.get(archive, params={"path": "in"}).content
    tarred = server.client.get(archive, params={"path": "in", "format": "tar"}).content
    again = server.client.get(archive, params={"path": "in"}).content

    assert zipped == again, "equal files, unequal zips"
    with zipfile.ZipFile(io.BytesIO(zipped)) as opened:
        assert opened.namelist() == ["1", "deep/2"], "a link is no file"
        assert opened.testzip() is None
    with tarfile.open(fileobj=io.BytesIO(tarred)) as tar:
        assert tar.getnames()
    for body, form, to in ((zipped, "zip", "out-zip"), (tarred, "tar", "out-tar")):
        put = server.client.put(archive, params={"path": to, "format": form}, content=body)
        assert put.status_code == 204, put.text
    seen = run(server, box, command="cat out-zip/deep/2; find out-tar -name 2 | xargs cat")
    assert seen["stdout"] == "two\ntwo\n"


def test_an_evil_zip_stays_inside_and_a_bomb_fills_only_its_machine(server: Server) -> None:
    url = make(server, limits={"disk_mib": 128, "memory_mib": 512})
    evil = io.BytesIO()
    with zipfile.ZipFile(evil, "w") as archive:
        archive.writestr("../../../../tmp/escaped", "x")
        archive.writestr("/etc/escaped", "x")
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(300 << 20))

    put = server.client.put(f"{url}/files/archive", params={"path": "e"}, content=evil.getvalue())
    assert put.status_code == 204, put.text
    found = run(server, url, command="find / -name escaped 2>/dev/null | sort")["stdout"]
    assert found == "/workspace/e/etc/escaped\n/workspace/e/tmp/escaped\n"
    burst = server.client.put(
        f"{url}/files/archive", params={"path": "b"}, content=bomb.getvalue(), timeout=60
    )
    assert (burst.status_code, burst.json()["code"]) == (422, "machine_full")
    for body in (b"", b"not a zip", evil.getvalue()[:-10]):
        bad = server.client.put(f"{url}/files/archive", content=body)
        assert (bad.status_code, bad.json()["code"]) == (400, "bad_request"), bad.text
    assert server.client.delete(url).status_code == 204


def test_a_paused_sandbox_stands_still_and_goes_on(server: Server, box: str) -> None:
    count = "n=0; while :; do n=$((n+1)); echo $n > count; sleep 0.02; done"
    server.client.post(f"{box}/exec", json={"command": count, "background": True})
    time.sleep(0.2)

    assert server.client.post(f"{box}/pause").json()["state"] == "paused"
    refused = server.client.post(f"{box}/exec", json={"argv": ["true"]})
    assert (refused.status_code, refused.json()["code"]) == (409, "machine_paused")
    first = server.client.get(box).json()["usage"]["cpu_s"]
    time.sleep(0.3)
    assert server.client.get(box).json()["usage"]["cpu_s"] == pytest.approx(first, abs=0.01)
    assert server.client.post(f"{box}/resume").json()["state"] == "running"
    before = int(run(server, box, argv=["cat", "count"])["stdout"])
    time.sleep(0.2)
    assert int(run(server, box, argv=["cat", "count"])["stdout"]) > before


def test_a_sandbox_ends_when_its_time_is_up(server: Server) -> None:
    url = make(server, ttl_s=1.5)
    kept = make(server, ttl_s=1.5)
    assert server.client.post(f"{kept}/keep-alive", json={"ttl_s": 600}).status_code == 200

    ended = wait_for_end(server, url)

    assert ended["reason"] == "expired"
    gone = server.client.post(f"{url}/exec", json={"argv": ["true"]})
    assert (gone.status_code, gone.json()["code"]) == (404, "no_such_sandbox")
    assert server.client.post(f"{url}/keep-alive", json={}).status_code == 404
    assert run(server, kept, argv=["echo", "here"])["stdout"] == "here\n"
    assert server.client.delete(kept).status_code == 204
    assert server.client.delete(kept).status_code == 204, "a second time"


def test_a_sandbox_ends_when_nobody_uses_it_and_not_before(server: Server) -> None:
    url = make(server, idle_s=1.5)
    watched = make(server, idle_s=1.5)
    finished = threading.Event()

    def use() -> None:
        run(server, watched, argv=["sleep", "4"])
        finished.set()

    threading.Thread(target=use).start()

    assert wait_for_end(server, url)["reason"] == "idle"
    assert finished.wait(10), "a sandbox in use was ended"
    assert wait_for_end(server, watched)["reason"] == "idle"


def test_bad_orders_are_refused_and_nothing_is_made(server: Server, box: str) -> None:
    before = len(server.client.get("/v1/sandboxes").json()["sandboxes"])
    for order in (
        {"ttl_s": -1},
        {"ttl_s": 1e9},
        {"limits": {"vcpus": 0}},
        {"limits": {"wall_s": 1}},
        {"image": "none"},
        {"min_rung": "firecracker"},
        {"unknown": 1},
    ):
        answer = server.client.post("/v1/sandboxes", json=order)
        assert 400 <= answer.status_code < 500 or answer.json()["code"] == "backend_unavailable"
        assert answer.json()["remedy"], order
    assert len(server.client.get("/v1/sandboxes").json()["sandboxes"]) == before
    for body in ({}, {"argv": []}, {"argv": ["a"], "command": "b"}, {"command": "x\0"}):
        assert server.client.post(f"{box}/exec", json=body).status_code == 400, body
    missing = server.client.post(f"{box}/exec", json={"argv": ["no-such-program"]})
    assert missing.json()["code"] == "command_not_started"
    assert server.client.get(f"{box}/processes/0000").status_code == 404
    assert server.client.get(f"{box}/processes/..%2f").status_code in (400, 404)


def test_tenants_do_not_reach_each_others_sandboxes(server: Server) -> None:
    def key(tenant: str, role: str = "member") -> dict[str, str]:
        made = server.client.post("/v1/keys", json={"tenant": tenant, "role": role}).json()
        return {"x-api-key": made["key"]}

    anna, bert, reader = key("anna"), key("bert"), key("anna", "read-only")
    base = server.client.base_url

    def call(method: str, path: str, headers: dict[str, str], **options: Any) -> httpx.Response:
        return httpx.request(method, base.join(path), headers=headers, timeout=30, **options)

    made = call("POST", "/v1/sandboxes", anna, json={})
    url = f"/v1/sandboxes/{made.json()['id']}"
    attempts: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", url, {}),
        ("DELETE", url, {}),
        ("POST", f"{url}/pause", {}),
        ("POST", f"{url}/resume", {}),
        ("POST", f"{url}/keep-alive", {"json": {}}),
        ("POST", f"{url}/exec", {"json": {"argv": ["true"]}}),
        ("POST", f"{url}/code", {"json": {"language": "bash", "code": "true"}}),
        ("GET", f"{url}/processes", {}),
        ("GET", f"{url}/files?path=x", {}),
        ("PUT", f"{url}/files?path=x", {"content": b"x"}),
        ("GET", f"{url}/files/list", {}),
        ("GET", f"{url}/files/archive", {}),
        ("GET", f"{url}/files/watch", {}),
    ]
    for method, path, options in attempts:
        assert call(method, path, bert, **options).status_code == 404, (method, path)
        assert call(method, path, {}, **options).status_code == 401, (method, path)
        if method != "GET":
            assert call(method, path, reader, **options).status_code == 403, (method, path)
    assert call("GET", "/v1/sandboxes", bert).json() == {"sandboxes": []}
    assert call("GET", f"{url}/files/list", reader).status_code == 200
    assert call("DELETE", url, anna).status_code == 204


def test_sandboxes_outlive_the_server(tmp_path_factory: pytest.TempPathFactory, data: Path) -> None:
    folder = tmp_path_factory.mktemp("restarted")
    (folder / "images").symlink_to(data / "images")
    server = Server(folder)
    url = make(server, env={"COLOUR": "green"})
    short = make(server, ttl_s=2)
    body = {"command": "for n in $(seq 60); do echo $n; sleep 0.05; done", "background": True}
    process = server.client.post(f"{url}/exec", json=body).json()["id"]

    server.stop(signal.SIGKILL)
    server.start()

    with server.client.stream("GET", f"{url}/processes/{process}/output") as answer:
        text = "".join(data.get("text", "") for _, _, data in events(answer))
    assert text == "".join(f"{n}\n" for n in range(1, 61))
    assert run(server, url, command="echo $COLOUR")["stdout"] == "green\n"
    assert wait_for_end(server, short)["reason"] == "expired"
    assert server.client.delete(url).status_code == 204
    server.stop()
    assert leftovers(folder) == []


def test_a_machine_that_dies_is_told_of(server: Server) -> None:
    url = make(server)
    machine = server.data / "machines" / url.rpartition("/")[2]
    pid = int((machine / "pid").read_text())

    with server.client.stream(
        "POST",
        f"{url}/exec",
        json={"command": "echo up; sleep 60"},
        headers={"accept": "text/event-stream"},
    ) as answer:
        stream = events(answer)
        assert [next(stream)[1], next(stream)[1]] == ["started", "output"]
        os.kill(pid, signal.SIGKILL)
        name, told = next(stream)[1:]

    assert (name, told["code"]) == ("error", "sandbox_lost")
    assert wait_for_end(server, url)["reason"] == "lost"


def test_a_jobs_files_are_there_while_it_runs_and_while_it_is_kept(server: Server) -> None:
    code = "echo mine > out.txt; while [ ! -e go ]; do sleep 0.02; done; cat go"
    job_id = server.submit(kind="shell", code=code, keep_alive_s=60)
    files = f"/v1/jobs/{job_id}/files"
    deadline = time.monotonic() + 20
    while server.client.get(files, params={"path": "out.txt"}).text != "mine\n":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.client.put(files, params={"path": "go"}, content=b"sent in\n")

    assert server.end_of(job_id)["stdout"] == "sent in\n"

    assert server.client.get(files, params={"path": "out.txt"}).text == "mine\n"
    kept = server.client.get("/v1/sandboxes").json()["sandboxes"]
    mine = next(one for one in kept if one["job"] == job_id)
    assert run(server, f"/v1/sandboxes/{mine['id']}", argv=["cat", "out.txt"])["stdout"] == "mine\n"
    assert server.client.delete(f"/v1/sandboxes/{mine['id']}").status_code == 204
    gone = server.client.get(files, params={"path": "out.txt"})
    assert (gone.status_code, gone.json()["code"]) == (404, "no_such_sandbox")


def test_a_job_that_is_not_kept_has_no_files_after_its_end(server: Server) -> None:
    job_id = server.submit(kind="shell", code="true")
    server.end_of(job_id)

    answer = server.client.get(f"/v1/jobs/{job_id}/files/list")

    assert (answer.status_code, "keep_alive_s" in answer.json()["remedy"]) == (404, True)


def test_the_command_line_makes_uses_and_ends_a_sandbox(server: Server, tmp_path: Path) -> None:
    made = cloche(server, "sandbox", "create", "--ttl", "600", "--label", "team=blue")
    assert made.returncode == 0, made.stderr
    sandbox_id = made.stdout.strip()
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/deep/file").write_text("from here\n")
    (tmp_path / "tool.sh").write_text("#!/bin/sh\necho tool $1\n")
    (tmp_path / "tool.sh").chmod(0o755)

    assert sandbox_id in cloche(server, "sandbox", "list").stdout
    assert cloche(server, "files", "put", sandbox_id, str(tmp_path / "tree")).returncode == 0
    assert cloche(server, "files", "put", sandbox_id, str(tmp_path / "tool.sh")).returncode == 0
    done = cloche(server, "sandbox", "exec", sandbox_id, "--", "./tool.sh", "x")
    assert (done.returncode, done.stdout) == (0, "tool x\n"), done.stderr
    failed = cloche(server, "sandbox", "exec", sandbox_id, "--", "bash", "-c", "exit 4")
    assert failed.returncode == 4
    got = cloche(server, "files", "get", sandbox_id, "tree/deep/file", "-")
    assert got.stdout == "from here\n", got.stderr
    assert "tree/" in cloche(server, "files", "list", sandbox_id).stdout
    place = tmp_path / "tree.zip"
    assert cloche(server, "files", "get", sandbox_id, "tree", str(place)).returncode == 0
    assert zipfile.ZipFile(place).namelist() == ["deep/file"]
    assert cloche(server, "files", "move", sandbox_id, "tree", "wood").returncode == 0
    assert cloche(server, "files", "remove", sandbox_id, "wood", "-r").returncode == 0
    for command in (("pause",), ("resume",), ("keep", "--ttl", "60"), ("delete",)):
        done = cloche(server, "sandbox", command[0], sandbox_id, *command[1:])
        assert done.returncode == 0, done.stderr
    missing = cloche(server, "files", "list", sandbox_id)
    assert (missing.returncode, "try:" in missing.stderr) == (2, True)
