"""Files that jobs are given: inline, uploaded, or left by an earlier job."""

from __future__ import annotations

import base64
import io
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from leftovers import leftovers
from serving import Server


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    server = Server(data)
    yield server
    assert server.stop() == 128 + signal.SIGTERM
    assert leftovers(data) == []


def upload(server: Server, content: bytes) -> str:
    answer = server.client.post("/v1/uploads", content=content)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def zipped(**files: str) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return archive.getvalue()


def test_a_job_finds_its_files_before_its_first_step(server: Server) -> None:
    earlier = server.submit(kind="shell", code="mkdir d; echo left > d/left.txt")
    server.end_of(earlier)
    blob = bytes(range(256))

    job_id = server.submit(
        kind="shell",
        code="cat a.txt /home/user/tree/b.txt old/d/left.txt; sha256sum raw.bin up.bin | cut -c1-8",
        files=[
            {"path": "a.txt", "content": "ä inline\n"},
            {"path": "raw.bin", "content": base64.b64encode(blob).decode(), "encoding": "base64"},
            {"path": "up.bin", "upload": upload(server, blob)},
            {
                "path": "/home/user/tree",
                "upload": upload(server, zipped(**{"b.txt": "unpacked\n"})),
                "unpack": True,
            },
            {"path": "old", "job": earlier},
        ],
    )

    status = server.end_of(job_id)
    assert status["state"] == "succeeded", status
    assert status["stdout"] == "ä inline\nunpacked\nleft\n40aff2e9\n40aff2e9\n"
    events = server.client.get(f"/v1/jobs/{job_id}/events").json()["events"]
    assert [one["kind"] for one in events].index("inputs") < [one["kind"] for one in events].index(
        "step"
    )


@pytest.mark.parametrize(
    ("file", "status", "code"),
    [
        ({"path": "x"}, 400, "bad_request"),
        ({"path": "x", "content": "a", "job": "0" * 16}, 400, "bad_request"),
        ({"path": "x", "content": "a", "unpack": True}, 400, "bad_request"),
        ({"path": "x", "content": "@", "encoding": "base64"}, 400, "bad_request"),
        ({"path": "/etc/x", "content": "a"}, 400, "bad_request"),
        ({"path": "x", "upload": "../../etc"}, 400, "bad_request"),
        ({"path": "x", "upload": "0" * 32}, 404, "no_such_upload"),
        ({"path": "x", "job": "0" * 16}, 404, "no_such_job"),
    ],
    ids=str,
)
def test_files_that_cannot_be_are_refused_at_submit(
    server: Server, file: dict[str, object], status: int, code: str
) -> None:
    answer = server.client.post("/schedule", json={"kind": "shell", "code": ":", "files": [file]})

    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.json()["remedy"]


def test_files_of_others_and_of_unfinished_jobs_are_refused(server: Server) -> None:
    made = server.client.post("/v1/keys", json={"tenant": "stranger"}).json()
    mine, running = upload(server, b"mine"), server.submit(kind="shell", code="sleep 30")
    done = server.submit(kind="shell", code="echo x > x")
    server.end_of(done)

    def status(key: str | None, **file: str) -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"kind": "shell", "code": ":", "files": [{"path": "x", **file}]}
        return server.client.post("/schedule", json=body, headers=headers).status_code

    assert status(made["key"], upload=mine) == 404
    assert status(made["key"], job=done) == 404
    assert status(None, job=running) == 409
    server.client.post(f"/v1/jobs/{running}/cancel")
    server.end_of(running)


def test_a_file_that_cannot_be_placed_fails_the_job_and_says_why(server: Server) -> None:
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(300 << 20))
    cases = (
        (upload(server, b"no zip"), "cannot be unpacked"),
        (upload(server, bomb.getvalue()), "disk does not hold"),
    )
    for upload_id, said in cases:
        job_id = server.submit(
            kind="shell",
            code="echo never",
            limits={"disk_mib": 128},
            files=[{"path": "x", "upload": upload_id, "unpack": True}],
        )
        status = server.end_of(job_id)
        assert (status["state"], status["reason"]) == ("failed", "bad_step")
        assert said in str(status["error"])
        assert status["stdout"] == ""


def test_an_upload_that_went_meanwhile_fails_the_job(server: Server) -> None:
    blocker = [server.submit(kind="shell", code="sleep 2") for _ in range(4)]
    gone = upload(server, b"gone")
    job_id = server.submit(kind="shell", code=":", files=[{"path": "x", "upload": gone}])
    assert server.client.delete(f"/v1/uploads/{gone}").status_code == 204

    status = server.end_of(job_id)

    assert (status["reason"], "is gone" in str(status["error"])) == ("bad_step", True), status
    for other in blocker:
        server.end_of(other)


def test_a_large_file_goes_in_without_filling_the_servers_memory(server: Server) -> None:
    def resident() -> int:
        lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10

    def pieces() -> Iterator[bytes]:
        for _ in range(200):
            yield bytes(1 << 20)

    before = resident()
    answer = httpx.post(
        server.client.base_url.join("/v1/uploads"),
        content=pieces(),
        headers=dict(server.client.headers),
        timeout=120,
    )
    big = answer.json()["id"]
    job_id = server.submit(
        kind="shell", code="stat -c %s big", files=[{"path": "big", "upload": big}], artifacts=["x"]
    )

    assert server.end_of(job_id)["stdout"] == f"{200 << 20}\n"
    assert resident() - before < 100, "MiB more than before"
