"""A `kill -9` of our process, at any moment, leaves nothing that the next start does not sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import cgroups_of, leftovers

from cloche.backends.container import Backend

COMMAND = [
    *(sys.executable, "-c", "from cloche.cli import main; main()"),
    *("exec", "--disk", "256", "--", "sleep", "30"),
]
START_S = 0.9
"""By then a machine is up and its command runs, even on a busy host."""


@pytest.mark.parametrize("part", range(16))
async def test_a_kill_at_any_point_of_a_run_is_swept_clean(data: Path, part: int) -> None:
    process = subprocess.Popen(
        COMMAND,
        env={**os.environ, "CLOCHE_DATA": str(data)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    time.sleep(START_S * part / 15)
    alive_when_killed = process.poll() is None
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert alive_when_killed, said
    machines = {path.name for path in (data / "machines").glob("[0-9a-f]*")}

    backend = Backend(data)
    await backend.sweep()

    # A start that was cut short before its machine had a folder is young, and spared for a minute.
    drafts = list((data / "machines").glob(".new-*"))
    left = [item for item in leftovers(data) if "/.new-" not in item]
    assert left == [], f"killed after {START_S * part / 15:.2f} s"
    assert cgroups_of(machines) == []
    for draft in drafts:
        os.utime(draft, (0, 0))
    await backend.sweep()
    assert leftovers(data) == []


async def test_the_next_start_sweeps_by_itself(data: Path) -> None:
    environment = {**os.environ, "CLOCHE_DATA": str(data)}
    process = subprocess.Popen(COMMAND, env=environment, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (machines := set(data.glob("machines/[0-9a-f]*/pid"))):
        assert time.monotonic() < deadline, "no machine came up"
        time.sleep(0.01)
    process.kill()
    process.wait()

    done = subprocess.run(
        [*COMMAND[:3], "exec", "--python", "print(6*7)"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "42\n", done.stderr
    assert leftovers(data) == []
    assert cgroups_of({path.parent.name for path in machines}) == []
