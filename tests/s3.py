"""A real S3 server, for as long as a test run needs one."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEY_ID = "AKIDEXAMPLE"
SECRET = "a-secret-of-the-tests"
BUCKET = "bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3:
    """Where the server is, and where it keeps what it is given."""

    endpoint: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead a client there."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def files(self) -> list[str]:
        """Everything that lies there, parts of unfinished uploads too."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in found)


@contextlib.contextmanager
def s3() -> Iterator[S3]:
    """Start `rclone serve s3` on a folder of its own, with one empty bucket."""
    rclone = Path(sys.executable).parent / "rclone"
    with tempfile.TemporaryDirectory(prefix="cloche-s3-") as name:
        folder = Path(name)
        (folder / BUCKET).mkdir()
        port = _free_port()
        process = subprocess.Popen(
            [
                *(str(rclone), "serve", "s3", "--auth-key", f"{KEY_ID},{SECRET}"),
                *("--addr", f"127.0.0.1:{port}", "--vfs-cache-mode=off", str(folder)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port, process)
            with _partial_content(port) as endpoint:
                yield S3(endpoint=endpoint, folder=folder / BUCKET)
        finally:
            process.kill()  # Told to end in order, it waits for idle connections.
            process.wait(timeout=20)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port), timeout=5),
        ):
            return
        assert process.poll() is None, "rclone ended"
        assert time.monotonic() < deadline, "rclone does not listen"
        time.sleep(0.02)


@contextlib.contextmanager
def _partial_content(port: int) -> Iterator[str]:
    """Answer ranges as S3 does: rclone sends the right bytes, with 200 in place of 206.

    https://github.com/johannesboyne/gofakes3/pull/121 mended that, after the rclone we have.
    """

    class Relay(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def relay(self) -> None:
            behind = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            with contextlib.closing(behind):
                behind.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in self.headers.items():
                    behind.putheader(name, value)
                behind.endheaders()
                left = int(self.headers.get("content-length", 0))
                while left and (data := self.rfile.read(min(left, 1 << 16))):
                    behind.send(data)
                    left -= len(data)
                self._answer(behind.getresponse())

        def _answer(self, answer: http.client.HTTPResponse) -> None:
            partial = answer.status == 200 and "content-range" in answer.headers
            self.send_response_only(206 if partial else answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            chunked = "content-length" not in answer.headers and answer.status != 204
            if chunked:
                self.send_header("connection", "close")
                self.close_connection = True
            self.end_headers()
            while data := answer.read(1 << 16):
                self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that went away is none of a test's concern."""

    with Server(("127.0.0.1", 0), Relay) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
