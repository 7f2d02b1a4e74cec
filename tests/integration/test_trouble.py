"""A host in trouble: a full disk, a folder that cannot be written, a store that goes away.

Each is told clearly, and no acknowledged job is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from leftovers import leftovers
from serving import CLOCHE, KEY, Server

from postgres import Postgres

COUNT = "import time\nfor n in range(80):\n    print(n, flush=True)\n    time.sleep(0.05)\n"
COUNTED = "".join(f"{n}\n" for n in range(80))


@contextlib.contextmanager
def small_disk(place: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of `mib` MiB of its own."""
    image, folder = place / "disk", place / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        os.ftruncate(file.fileno(), mib << 20)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def serve(data: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLOCHE, "serve", "--port", "0", "--data", str(data)],
        env={**os.environ, "CLOCHE_API_KEY": KEY},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_data_folder_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with small_disk(tmp_path, 8) as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        refusals = [serve(folder), serve(folder / "below"), serve(tmp_path / "file/below")]

    for refused in refusals:
        assert refused.returncode == 125, refused.stderr
        assert "cannot be written" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_full_disk_is_told_of_and_no_acknowledged_job_is_lost(tmp_path: Path, data: Path) -> None:
    with small_disk(tmp_path, 96) as folder:
        (folder / "images").symlink_to(data / "images")
        server = Server(folder, CLOCHE_POOL_SIZE="0")
        try:
            accepted = [server.submit(kind="python", code=COUNT)]
            while not server.log(accepted[0]):
                time.sleep(0.05)
            fill(folder)
            refused = None
            for _ in range(2000):
                answer = server.client.post(
                    "/schedule", json={"kind": "shell", "code": f"echo {'x' * 5000}"}
                )
                if answer.status_code != 200:
                    refused = answer
                    break
                accepted.append(answer.json()["job_id"])
            assert refused is not None
            assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
            assert "room" in refused.json()["remedy"]
            assert httpx.get(server.client.base_url.join("/healthz")).status_code == 200

            (folder / "ballast").unlink()
            states = [server.end_of(job_id, 90)["state"] for job_id in accepted]

            assert set(states) <= {"succeeded", "failed"}
            assert server.log(accepted[0]).decode() == COUNTED
            again = server.submit(kind="shell", code="echo back")
            assert server.end_of(again)["stdout"] == "back\n"
        finally:
            server.stop()
        assert leftovers(folder)[1:] == [], "besides the mount itself"


def fill(folder: Path) -> None:
    """Take all the room there is."""
    with (folder / "ballast").open("wb") as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            file.flush()


@pytest.mark.parametrize(
    "away_s", [3, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_a_store_that_goes_away_comes_back_to_every_job(
    tmp_path: Path, data: Path, away_s: float
) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    database = Postgres()
    try:
        database.start()
        server = Server(tmp_path, CLOCHE_DATABASE=database.address)
        try:
            accepted = [server.submit(kind="python", code=COUNT) for _ in range(3)]
            accepted += [server.submit(kind="shell", code="echo queued") for _ in range(5)]
            time.sleep(1)
            database.stop()
            deadline = time.monotonic() + away_s
            while time.monotonic() < deadline:
                refused = server.client.post("/schedule", json={"kind": "shell", "code": "true"})
                assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
                assert refused.json()["remedy"]
                time.sleep(0.5)
            database.start()

            ended = [server.end_of(job_id, 120) for job_id in accepted]

            assert [status["state"] for status in ended] == ["succeeded"] * 8
            for job_id in accepted[:3]:
                assert server.log(job_id).decode() == COUNTED, "a gap or a repeat"
        finally:
            server.stop()
            database.stop()
        assert leftovers(tmp_path) == []
    finally:
        shutil.rmtree(database.folder)
