"""`cloche up`: a server from nothing, and a word on how to go on."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from leftovers import leftovers
from serving import CLOCHE, KEY


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("CLOCHE_")}
    return {**ours, "CLOCHE_POOL_SIZE": "1", **more}


@contextlib.contextmanager
def up(data: Path, **more: str) -> Iterator[str]:
    """Run `cloche up` to its banner; yield that."""
    log = data / "up.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*CLOCHE, "up", "--port", "0", "--data", str(data)],
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stderr=sink,
        )
    try:
        deadline = time.monotonic() + 30
        while "Ctrl-C stops" not in (said := log.read_text()):
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        yield said
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM, log.read_text()


def on_a_terminal(*arguments: str, types: bytes = b"", **more: str) -> tuple[int, str]:
    """Run a command on a terminal, and stop it once it has said how to."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*CLOCHE, *arguments], env=environment(**more), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said, told = b"", False
    os.write(ours, types)
    deadline = time.monotonic() + 40
    with contextlib.suppress(OSError):  # It has ended, and the terminal with it.
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                said += os.read(ours, 65536)
            if b"stops the server" in said and not told:
                told = True
                process.send_signal(signal.SIGINT)
    code = process.wait(timeout=30)
    os.close(ours)
    return code, said.decode()


@pytest.fixture
def folder(tmp_path: Path, data: Path) -> Iterator[Path]:
    (tmp_path / "images").symlink_to(data / "images")
    yield tmp_path
    assert leftovers(tmp_path) == []


def test_the_banner_says_how_to_go_on(folder: Path) -> None:
    with up(folder) as said:
        url = re.search(r"Cloche is at (\S+), giving machines of the container rung", said)
        assert url is not None, said
        assert "\033[" not in said, "colours, but nobody sees them"
        assert "namespaces" in said
        assert re.search(r"runtime: +(runc|crun) version", said)
        assert "warming 1 in the background" in said
        assert f"key:       in {folder}/api-key" in said

        link = re.search(r"http\S+/login\?token=\S+", said)
        assert link is not None, said
        with httpx.Client(base_url=url[1]) as browser:
            token = link[0].partition("token=")[2]
            answer = browser.post("/login", data={"token": token}, headers={"origin": url[1]})
            assert answer.status_code == 303, answer.text
            whoami = browser.get("/v1/whoami").json()
            assert (whoami["tenant"], whoami["role"]) == ("default", "admin")
            assert "Cloche is up" in browser.get("/").text

        first_job = re.search(r"^ +(CLOCHE_URL=.* cloche run .*)$", said, re.MULTILINE)
        assert first_job is not None, said
        command = first_job[1].replace(" cloche run", ' "$PYTHON" -c "$MAIN" run')
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment(PYTHON=CLOCHE[0], MAIN=CLOCHE[2]),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_the_banner_tells_of_a_key_from_the_environment_and_of_none(folder: Path) -> None:
    with up(folder, CLOCHE_API_KEY=KEY, CLOCHE_POOL_SIZE="0") as said:
        assert "the one in CLOCHE_API_KEY" in said
        assert KEY not in said
        assert "/login?token=" in said
        assert "each started when it is needed" in said
    with up(folder, CLOCHE_AUTH="off") as said:
        assert "CLOCHE_AUTH is off" in said
        assert "/login" not in said


def test_a_terminal_gets_colours_and_a_whole_link(folder: Path) -> None:
    code, said = on_a_terminal(
        "up", "--port", "0", "--data", str(folder), TERM="xterm-256color", COLUMNS="40"
    )

    assert code == 128 + signal.SIGINT, said
    assert "\033[" in said
    assert re.search(r"http://127\.0\.0\.1:\d+/login\?token=[\w-]{43}\s", said), said


def test_without_an_image_it_offers_to_build_one(tmp_path: Path) -> None:
    code, said = on_a_terminal(
        "up", "--port", "0", "--data", str(tmp_path), types=b"n\n", TERM="xterm"
    )

    assert code == 2, said
    assert "Build it now?" in said
    assert "image_missing" in said


def test_without_an_image_or_a_terminal_it_builds_one(tmp_path: Path) -> None:
    nowhere = tmp_path / "sources.list"
    nowhere.write_text(f"deb [trusted=yes] file://{tmp_path}/nothing bookworm main\n")

    done = subprocess.run(
        [*CLOCHE, "up", "--port", "0", "--data", str(tmp_path / "data")],
        env=environment(CLOCHE_APT_SOURCES=str(nowhere)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "Building it now" in done.stderr
    assert re.search(r"^ +\d+% ", done.stderr, re.MULTILINE), "no progress was told"
    assert (done.returncode, "image_build_failed" in done.stderr) == (125, True), done.stderr


def test_what_stands_in_the_way_is_told_before_anything_is_built(tmp_path: Path) -> None:
    def fails(*arguments: str, before: str = "", **more: str) -> str:
        done = subprocess.run(
            [*before.split(), *CLOCHE, "up", *arguments, "--data", str(tmp_path)],
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 125, done.stderr
        assert "Building" not in done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Cannot listen" in fails("--port", str(taken.getsockname()[1]))
    nobody = "setpriv --reuid=65534 --clear-groups"
    assert "needs root" in fails("--port", "0", before=nobody)
    assert "let anyone" in fails("--host", "0.0.0.0", "--port", "0", CLOCHE_AUTH="off")
