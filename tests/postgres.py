"""A real PostgreSQL server, for as long as a test run needs one."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

USER = "postgres"


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start a server of our own on a unix socket; yield the address of an empty database."""
    programs = max(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name)
    )
    folder = Path(tempfile.mkdtemp(prefix="cloche-postgres-"))
    account = pwd.getpwnam(USER)
    os.chown(folder, account.pw_uid, account.pw_gid)

    def run(*command: str) -> None:
        # PostgreSQL refuses to run as root.
        argv = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", *command]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"

    data = folder / "data"
    control = str(programs / "pg_ctl")
    try:
        run(str(programs / "initdb"), "--pgdata", str(data), "--auth=trust", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        log = str(folder / "log")
        run(control, "start", "--wait", "--pgdata", str(data), "--log", log, "--options", options)
        try:
            yield f"postgresql://{USER}@/postgres?host={folder}"
        finally:
            run(control, "stop", "--wait", "--mode=immediate", "--pgdata", str(data))
    finally:
        shutil.rmtree(folder)
