"""Renames elsewhere on the host do not get into the way of a machine's file calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cloche import settings
from cloche.backends import container
from cloche.core.spec import SandboxSpec
from cloche.sandbox.images import Images
from cloche.sandbox.sandbox import Sandbox

STORM = """
import os, sys, time
os.chdir(sys.argv[1])
open("a", "w").close()
end = time.time() + 30
while time.time() < end:
    os.rename("a", "b")
    os.rename("b", "a")
"""


async def test_links_with_dots_are_followed_in_a_storm_of_renames(data: Path) -> None:
    # openat2(2) answers EAGAIN when it passes a `..` while the kernel renames anything at all.
    backend = container.Backend(data)
    image = Images(settings.load().data).find()
    (data / "storm").mkdir()
    storm = subprocess.Popen([sys.executable, "-c", STORM, str(data / "storm")])
    try:
        async with await Sandbox.start_on(backend, SandboxSpec(), image) as sandbox:
            script = "mkdir -p a/b/c; echo found > file; ln -s ../../../a/../a/../file a/b/c/link"
            await sandbox.exec(["sh", "-c", script])

            for _ in range(500):
                assert await sandbox.files.read("/workspace/a/b/c/link") == b"found\n"
    finally:
        storm.kill()
        storm.wait()
    backend.close()
