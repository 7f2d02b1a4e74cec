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


class Postgres:
    """A server of our own on a unix socket."""

    def __init__(self) -> None:
        self._programs = max(
            Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name)
        )
        self.folder = Path(tempfile.mkdtemp(prefix="cloche-postgres-"))
        account = pwd.getpwnam(USER)
        os.chown(self.folder, account.pw_uid, account.pw_gid)
        self._run("initdb", "--pgdata", str(self._data), "--auth=trust", "--no-sync")
        self.address = f"postgresql://{USER}@/postgres?host={self.folder}"

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c fsync=off"
        log = str(self.folder / "log")
        data = str(self._data)
        self._run("pg_ctl", "start", "--wait", "-D", data, "--log", log, "--options", options)

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate", "-D", str(self._data))

    def _run(self, program: str, *arguments: str) -> None:
        # PostgreSQL refuses to run as root.
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups"]
        argv = [*user, str(self._programs / program), *arguments]
        done = subprocess.run(argv, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start a server; yield the address of an empty database."""
    server = Postgres()
    try:
        server.start()
        try:
            yield server.address
        finally:
            server.stop()
    finally:
        shutil.rmtree(server.folder)
