"""The command line, run as a person runs it."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import leftovers

CLOCHE = [sys.executable, "-c", "from cloche.cli import main; main()"]


@pytest.fixture
def environment(data: Path) -> dict[str, str]:
    return {**os.environ, "CLOCHE_DATA": str(data), "COLUMNS": "200"}


def run(
    environment: dict[str, str], *arguments: str, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*CLOCHE, *arguments], env=environment, input=stdin, capture_output=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "stdout"),
    [
        (["--python", "print(6*7)"], b"42\n"),
        (["--ts", "enum A { B = 42 }; console.log(A.B)"], b"42\n"),
        (["--js", "console.log(6*7)"], b"42\n"),
        (["--sh", "echo $((6*7))"], b"42\n"),
        (["--", "echo", "--python", "42"], b"--python 42\n"),
        (["echo", "-n", "42"], b"42"),
        (["-e", "A=b c", "--", "printenv", "A"], b"b c\n"),
        (["--cwd", "/tmp", "--", "pwd"], b"/tmp\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_exec_prints_what_it_ran(
    environment: dict[str, str], arguments: list[str], stdout: bytes
) -> None:
    done = run(environment, "exec", *arguments)

    assert (done.returncode, done.stdout) == (0, stdout), done.stderr.decode()


def test_exec_ends_with_the_exit_code_and_keeps_the_streams_apart(
    environment: dict[str, str],
) -> None:
    done = run(environment, "exec", "--sh", "echo out; echo err >&2; exit 3")

    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_exec_passes_every_byte_of_its_input_on(environment: dict[str, str]) -> None:
    every_byte = bytes(range(256)) * 4096

    done = run(environment, "exec", "cat", stdin=every_byte)

    assert done.stdout == every_byte, done.stderr.decode()


def test_exec_reads_code_from_its_input(environment: dict[str, str]) -> None:
    done = run(environment, "exec", "--python", "-", stdin=b"print('from a pipe')")

    assert done.stdout == b"from a pipe\n", done.stderr.decode()


def test_exec_json_tells_all(environment: dict[str, str]) -> None:
    done = run(environment, "exec", "--json", "--sh", "echo out; echo err >&2; kill -9 $$")

    told = json.loads(done.stdout)
    assert done.returncode == 137
    assert (told["exit_code"], told["signal"], told["timed_out"]) == (137, 9, False)
    assert (told["stdout"], told["stderr"], told["truncated"]) == ("out\n", "err\n", False)


def test_exec_ends_with_124_when_time_runs_out(environment: dict[str, str]) -> None:
    done = run(environment, "exec", "--timeout", "0.3", "sleep", "30")

    assert done.returncode == 124
    assert b"ran out of time" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["exec"], 2, "nothing to run"),
        (["exec", "--python", "--ts", "x"], 2, "python and typescript cannot be run at once"),
        (["exec", "--python", "print(1)", "print(2)"], 2, "one argument"),
        (["exec", "--memory", "0", "true"], 2, "memory_mib is 0"),
        (["exec", "--disk", "-1", "true"], 2, "disk_mib is -1"),
        (["exec", "--timeout", "0", "true"], 2, "timeout_s is 0"),
        (["exec", "--env", "novalue", "true"], 2, "is not NAME=VALUE"),
        (["exec", "no-such-program"], 2, "no-such-program"),
        (["exec", "--cwd", "/nowhere", "true"], 2, "/nowhere"),
        (["shell"], 2, "needs a terminal"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_a_sentence_and_a_remedy(
    environment: dict[str, str], data: Path, arguments: list[str], code: int, said: str
) -> None:
    done = run(environment, *arguments)

    shown = done.stderr.decode()
    assert done.returncode == code, shown
    assert said in shown
    assert "try:" in shown
    assert "Traceback" not in shown
    assert leftovers(data) == []


def test_a_missing_image_is_named_with_the_command_that_builds_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = run({**environment, "CLOCHE_DATA": str(tmp_path)}, "exec", "true")

    assert done.returncode == 2
    assert "cloche image build" in done.stderr.decode()
    assert leftovers(tmp_path) == []


def test_no_oci_runtime_is_named_with_the_package_to_install(data: Path, tmp_path: Path) -> None:
    code = (
        "import asyncio, cloche.app as a, cloche.backends.container.backend as b\n"
        "b._RUNTIMES = ('no-such-runc',)\n"
        "from cloche.cli.show import show_error\n"
        "from cloche.core.errors import ClocheError\n"
        "from cloche.core.spec import SandboxSpec\n"
        f"backend = b.Backend(__import__('pathlib').Path({str(data)!r}), runtimes=b._RUNTIMES)\n"
        "try: asyncio.run(backend.check())\n"
        "except ClocheError as error: raise SystemExit(show_error(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert done.returncode == 125, done.stderr.decode()
    assert "install the package runc" in done.stderr.decode()


def test_without_root_it_says_so(data: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *CLOCHE, "exec", "true"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CLOCHE_DATA": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    if b"Permission denied" in done.stderr:
        pytest.fail(f"the interpreter cannot be run by another user: {done.stderr.decode()}")
    assert done.returncode == 125, done.stderr.decode()
    assert "needs root" in done.stderr.decode()
    assert "sudo" in done.stderr.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_exec_and_leaves_nothing(
    environment: dict[str, str], data: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [*CLOCHE, "exec", "--sh", "echo up; sleep 30"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(number)

    assert process.wait(timeout=20) == 128 + number
    assert leftovers(data) == []
    process.stdout.close()


def test_a_reader_that_has_seen_enough_ends_exec(environment: dict[str, str], data: Path) -> None:
    process = subprocess.Popen(
        [*CLOCHE, "exec", "yes"], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()

    assert process.wait(timeout=20) == 137
    assert leftovers(data) == []


def test_doctor_shows_every_rung_and_its_remedy(environment: dict[str, str]) -> None:
    done = run(environment, "doctor", "--json")

    rungs = {rung["rung"]: rung for rung in json.loads(done.stdout)["rungs"]}
    assert list(rungs) == ["firecracker", "qemu", "gvisor", "container", "docker"]
    assert rungs["container"]["available"], rungs["container"]
    assert rungs["container"]["start_ms"] > 0
    assert all(rung["available"] or rung["remedy"] for rung in rungs.values())
    assert b"container" in run(environment, "doctor").stdout


def test_help_answers_without_loading_the_world() -> None:
    # Not a timed test: what it loads is what it costs.
    code = (
        "import sys, runpy; sys.argv = ['cloche', '--help']\n"
        "from cloche.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'asyncio', 'pydantic', 'rich.markdown', 'h11', 'cloche.app'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "exec" in done.stdout
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_shell_is_a_terminal_in_a_machine(environment: dict[str, str], data: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*CLOCHE, "shell"], environment)

    try:
        said = read_until(terminal, b"$ ")
        os.write(terminal, b"tty; id -u; stty size; echo done-$((6*7))\n")
        said += read_until(terminal, b"done-42")
        os.write(terminal, b"sleep 30\n")
        time.sleep(0.3)
        os.write(terminal, b"\x03")
        os.write(terminal, b"echo interrupted-$?\n")
        said += read_until(terminal, b"interrupted-130")
        os.write(terminal, b"exit 5\n")
        said += read_until(terminal, None)
    finally:
        # Closing the terminal hangs the command up, if it has not ended by itself.
        os.close(terminal)
        _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 5, said.decode()
    assert b"/dev/pts/" in said
    assert b"1000" in said
    assert leftovers(data) == []


def read_until(terminal: int, wanted: bytes | None, timeout_s: float = 20.0) -> bytes:
    """Read from a terminal until `wanted` shows up, or with None until its other end closes."""
    said = b""
    deadline = time.monotonic() + timeout_s
    while wanted is None or wanted not in said:
        remaining = deadline - time.monotonic()
        assert remaining > 0, f"waited in vain for {wanted!r}: {said.decode(errors='replace')}"
        if select.select([terminal], [], [], remaining)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # EIO: the other end is closed.
                data = b""
            if not data:
                assert wanted is None, said
                return said
            said += data
    return said
