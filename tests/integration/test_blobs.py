"""Artifacts and uploads over HTTP, kept in a folder and on a real S3 server."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from leftovers import leftovers
from serving import CLOCHE, KEY, Server

from s3 import BUCKET, S3, s3

MIB = 1 << 20


class Kept(Server):
    """A server, and where its blobs lie."""

    def __init__(self, data: Path, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        super().__init__(data, **environment)

    def files(self) -> list[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def memory_mib(self, what: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        row = next(row for row in status.splitlines() if row.startswith(what))
        return int(row.split()[1]) / 1024

    def key_of(self, tenant: str) -> dict[str, str]:
        made = self.client.post("/v1/keys", json={"tenant": tenant}).json()
        return {"authorization": f"Bearer {made['key']}"}


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3]:
    with s3() as server:
        yield server


@pytest.fixture(scope="module", params=["folder", "s3"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: Path
) -> Iterator[Kept]:
    home = tmp_path_factory.mktemp("home")
    (home / "images").symlink_to(data / "images")
    if request.param == "folder":
        folder, environment = home / "blobs", {}
    else:
        behind: S3 = request.getfixturevalue("s3_server")
        folder = behind.folder / "pre/fix"
        environment = {**behind.environment, "CLOCHE_BLOBS": f"s3://{BUCKET}/pre/fix"}
    server = Kept(home, folder, {**environment, "CLOCHE_MAX_UPLOAD_MIB": "400"})
    yield server
    server.stop()
    assert leftovers(home) == []


CODE = """
import os, random
os.makedirs('out', exist_ok=True)
open('out/ü.txt', 'w').write('hello')
open('large', 'wb').write(random.Random(1).randbytes(3_000_000))
"""


@pytest.fixture(scope="module")
def job(server: Kept) -> str:
    job_id = server.submit(kind="python", code=CODE)
    assert server.end_of(job_id)["state"] == "succeeded"
    return job_id


def test_what_a_job_left_is_listed_and_each_file_is_read(server: Kept, job: str) -> None:
    listed = server.client.get(f"/v1/jobs/{job}/artifacts").json()
    assert listed == {
        "files": [{"path": "large", "size": 3_000_000}, {"path": "out/ü.txt", "size": 5}]
    }
    small = server.client.get(f"/v1/jobs/{job}/artifacts/out/ü.txt")
    assert (small.content, small.headers["content-length"]) == (b"hello", "5")
    assert small.headers["content-disposition"] == "attachment"
    assert small.headers["x-content-type-options"] == "nosniff"
    large = server.client.get(f"/v1/jobs/{job}/artifacts/large").content
    assert large == random.Random(1).randbytes(3_000_000)
    for path in ("nothing", "out", "../../api-key", "%2e%2e/%2e%2e/api-key", ""):
        assert server.client.get(f"/v1/jobs/{job}/artifacts/{path}").status_code == 404, path


def test_the_zip_is_downloaded_whole_and_in_ranges(server: Kept, job: str) -> None:
    url = f"/v1/jobs/{job}/artifacts.zip"
    whole = server.client.get(url)
    size = len(whole.content)
    tag = whole.headers["etag"]
    with zipfile.ZipFile(io.BytesIO(whole.content)) as zipped:
        assert zipped.testzip() is None
        assert zipped.namelist() == ["large", "out/ü.txt"]
    assert whole.headers["content-length"] == str(size)
    assert whole.headers["accept-ranges"] == "bytes"
    assert whole.headers["content-type"] == "application/zip"
    assert whole.headers["content-disposition"] == f'attachment; filename="{job}.zip"'

    def part(wanted: str, **headers: str) -> httpx.Response:
        return server.client.get(url, headers={"range": wanted, **headers})

    for wanted, start, stop in (
        ("bytes=0-3", 0, 4),
        ("bytes=1000000-2000000", 1_000_000, 2_000_001),
        (f"bytes={size - 1}-", size - 1, size),
        ("bytes=-22", size - 22, size),
        (f"bytes=5-{size * 2}", 5, size),
    ):
        answer = part(wanted)
        assert answer.status_code == 206, wanted
        assert answer.content == whole.content[start:stop], wanted
        assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
        assert answer.headers["content-length"] == str(stop - start)
        assert answer.headers["etag"] == tag
    refused = part(f"bytes={size}-")
    assert (refused.status_code, refused.json()["code"]) == (416, "range_refused")
    assert refused.headers["content-range"] == f"bytes */{size}"
    assert part("bytes=0-1,4-5").status_code == 200
    assert part("bytes=0-3", **{"if-range": tag}).status_code == 206
    assert part("bytes=0-3", **{"if-range": '"another"'}).status_code == 200
    head = server.client.head(url)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(size)


def test_a_job_without_files_has_an_empty_zip(server: Kept) -> None:
    job_id = server.submit(kind="shell", code="true")
    server.end_of(job_id)
    url = f"/v1/jobs/{job_id}/artifacts.zip"

    assert server.client.get(f"/v1/jobs/{job_id}/artifacts").json() == {"files": []}
    assert zipfile.ZipFile(io.BytesIO(server.client.get(url).content)).namelist() == []
    assert server.client.get(url, headers={"range": "bytes=0-1"}).content == b"PK"
    assert server.client.get(url, headers={"range": "bytes=22-"}).status_code == 416
    assert server.client.get(f"/v1/jobs/{job_id}/artifacts/x").status_code == 404
    assert not any(job_id in name for name in server.files()), "nothing need be kept"


def test_deleting_a_job_deletes_what_it_left(server: Kept) -> None:
    job_id = server.submit(kind="shell", code="echo > a")
    server.end_of(job_id)
    assert f"jobs/{job_id}/artifacts.zip" in server.files()

    assert server.client.delete(f"/v1/jobs/{job_id}").status_code == 204

    assert not any(job_id in name for name in server.files())
    assert server.client.get(f"/v1/jobs/{job_id}/artifacts.zip").status_code == 404


def test_an_upload_is_kept_told_of_and_deleted(server: Kept) -> None:
    data = random.Random(2).randbytes(20 * MIB)

    sent = server.client.post(
        "/v1/uploads", content=data, headers={"content-type": "image/x-anything"}
    )

    assert sent.status_code == 201, sent.text
    upload = sent.json()
    assert (upload["size"], upload["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert server.client.get(f"/v1/uploads/{upload['id']}").json() == upload
    assert (server.folder / "uploads" / upload["id"]).read_bytes() == data
    assert server.client.delete(f"/v1/uploads/{upload['id']}").status_code == 204
    for method in ("GET", "DELETE"):
        gone = server.client.request(method, f"/v1/uploads/{upload['id']}")
        assert (gone.status_code, gone.json()["code"]) == (404, "no_such_upload")
    assert not any(upload["id"] in name for name in server.files())


def test_an_empty_upload_is_an_upload(server: Kept) -> None:
    upload = server.client.post("/v1/uploads", content=b"").json()

    assert (upload["size"], upload["sha256"]) == (0, hashlib.sha256().hexdigest())
    assert server.client.delete(f"/v1/uploads/{upload['id']}").status_code == 204


def test_uploads_are_their_tenants_alone(server: Kept) -> None:
    alice, bob = server.key_of("alice"), server.key_of("bob")
    upload = server.client.post("/v1/uploads", content=b"mine", headers=alice).json()
    path = f"/v1/uploads/{upload['id']}"

    assert server.client.get(path, headers=bob).status_code == 404
    assert server.client.delete(path, headers=bob).status_code == 404
    assert httpx.post(server.client.base_url.join("/v1/uploads"), content=b"x").status_code == 401
    assert server.client.get(path, headers=alice).status_code == 200
    assert server.client.delete(path, headers=alice).status_code == 204


def blocks(count: int) -> Iterator[bytes]:
    block = random.Random(3).randbytes(MIB)
    for _ in range(count):
        yield block


@contextlib.contextmanager
def uploading(server: Kept, size: int) -> Iterator[socket.socket]:
    """Begin an upload by hand: its head is sent, its body is the caller's to send."""
    url = server.client.base_url
    with socket.create_connection((url.host, url.port or 80)) as wire:
        wire.sendall(
            f"POST /v1/uploads HTTP/1.1\r\nhost: {url.host}\r\nauthorization: Bearer {KEY}\r\n"
            f"content-length: {size}\r\n\r\n".encode()
        )
        yield wire


def test_an_upload_that_is_too_large_is_refused_and_leaves_nothing(server: Kept) -> None:
    before = server.files()

    with uploading(server, 500 * MIB) as wire:
        told = b""
        while not told.endswith(b"}"):
            told += wire.recv(65536)
    assert told.startswith(b"HTTP/1.1 413 "), told
    assert b"CLOCHE_MAX_UPLOAD_MIB" in told
    # Without its size told beforehand, and with the answer perhaps lost while it is still sent.
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        shown = server.client.post("/v1/uploads", content=blocks(410))
        assert shown.status_code == 413
    other = server.client.post("/v1/jobs", content=blocks(17))
    assert other.status_code == 413, "every other call has the small bound"

    wait_until(lambda: server.files() == before)


def test_an_upload_that_breaks_off_leaves_nothing(server: Kept) -> None:
    before = server.files()
    with uploading(server, 100 * MIB) as wire:
        for block in blocks(40):
            wire.sendall(block)

    wait_until(lambda: server.files() == before)
    assert "Traceback" not in (server.data / "server.log").read_text()


def wait_until(holds: object, timeout_s: float = 20.0) -> None:
    assert callable(holds)
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_large_upload_and_download_take_little_memory(server: Kept) -> None:
    job_id = server.submit(
        kind="shell", code="head -c 150000000 /dev/urandom > large; sha256sum large"
    )
    shown = str(server.end_of(job_id)["stdout"]).split()[0]
    before = server.memory_mib("VmRSS")

    upload = server.client.post("/v1/uploads", content=blocks(300))
    assert upload.status_code == 201, upload.text
    found = hashlib.sha256()
    with server.client.stream("GET", f"/v1/jobs/{job_id}/artifacts/large") as answer:
        for data in answer.iter_bytes():
            found.update(data)
    with server.client.stream("GET", f"/v1/jobs/{job_id}/artifacts.zip") as answer:
        size = sum(len(data) for data in answer.iter_bytes())

    grown = server.memory_mib("VmHWM") - before
    assert upload.json()["size"] == 300 * MIB
    assert found.hexdigest() == shown
    assert size > 150_000_000
    assert grown < 100, f"the server grew by {grown:.0f} MiB"
    server.client.delete(f"/v1/uploads/{upload.json()['id']}")


def cloche_gc(server: Kept, **environment: str) -> dict[str, int]:
    done = subprocess.run(
        [*CLOCHE, "gc", "--json"],
        env={
            **os.environ,
            **server.environment,
            "CLOCHE_DATA": str(server.data),
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def test_the_command_line_forgets_what_is_past_its_time(server: Kept) -> None:
    job_id = server.submit(kind="shell", code="echo kept > a")
    server.end_of(job_id)
    upload = server.client.post("/v1/uploads", content=b"12345").json()
    nothing = {"jobs": 0, "uploads": 0, "orphans": 0, "bytes": 0}

    assert cloche_gc(server) == nothing
    removed = cloche_gc(
        server, CLOCHE_KEEP_JOBS_DAYS="0.0000001", CLOCHE_KEEP_UPLOADS_DAYS="0.0000001"
    )

    assert removed["jobs"] >= 1
    assert removed["uploads"] >= 1
    assert removed["bytes"] > 5
    assert server.client.get(f"/v1/jobs/{job_id}").status_code == 404
    assert server.client.get(f"/v1/uploads/{upload['id']}").status_code == 404
    assert server.files() == []


def test_a_server_does_not_start_on_a_blob_store_that_is_away(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")

    def serve(**environment: str) -> str:
        done = subprocess.run(
            [*CLOCHE, "serve", "--port", "0"],
            env={**os.environ, "CLOCHE_DATA": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 125, done.stderr
        return done.stderr

    with s3() as server:
        environment = {**server.environment, "CLOCHE_BLOBS": f"s3://{BUCKET}"}
        assert "store_unavailable" in serve(**{**environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert "store_unavailable" in serve(**environment)
    assert "bad_settings" in serve(CLOCHE_BLOBS="ftp://somewhere")
