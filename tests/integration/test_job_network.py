"""A job's network, from the request to the list of what it connected to."""

from __future__ import annotations

import http.server
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Server


class Greeter(http.server.BaseHTTPRequestHandler):
    """Greets on the host's loopback, which the tests' operator allows."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "7")
        self.end_headers()
        self.wfile.write(b"welcome")

    def log_message(self, *_: object) -> None:
        """Say nothing: the test run's output is not for this."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Greeter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def server(data: Path, port: int) -> Iterator[Server]:
    server = Server(
        data,
        CLOCHE_ALLOW_ADDRESSES='["127.0.0.1/32"]',
        CLOCHE_NETWORK_PRESETS=f'{{"greeter": ["127.0.0.1:{port}"]}}',
    )
    yield server
    server.stop()


def asking(port: int) -> str:
    # The machine's own loopback is never asked for through the proxy, unless it is said.
    return f"NO_PROXY= no_proxy= curl -sS -m 10 http://127.0.0.1:{port}/"


def test_a_job_reaches_what_it_asked_for_and_the_list_tells(server: Server, port: int) -> None:
    code = f"{asking(port)}; {asking(1)}; {asking(1)}"
    job = server.submit(kind="shell", code=code, network=[f"127.0.0.1:{port}"])
    server.end_of(job)

    assert server.log(job).startswith(b"welcomeCloche: this machine's network policy")
    told = server.client.get(f"/v1/jobs/{job}/network").json()
    assert [(each["port"], each["verdict"], each["count"]) for each in told["attempts"]] == [
        (port, "allowed", 1),
        (1, "refused", 2),
    ]
    assert told["attempts"][0]["bytes_down"] > 7
    assert told["attempts"][0]["rule"] == f"127.0.0.1:{port}"
    assert (told["left_out"], told["next_after"]) == (0, None)


def test_a_preset_of_the_operators_is_known_by_name(server: Server, port: int) -> None:
    job = server.submit(kind="shell", code=asking(port), network="greeter")
    assert server.end_of(job)["state"] == "succeeded"
    assert server.log(job) == b"welcome"
    told = server.client.get(f"/v1/jobs/{job}/network").json()["attempts"]
    assert told[0]["rule"] == f"greeter: 127.0.0.1:{port}"


def test_a_job_has_no_network_unless_it_asks(server: Server, port: int) -> None:
    job = server.submit(kind="shell", code=f"env | grep -ci proxy; {asking(port)}")
    assert server.end_of(job)["state"] == "failed"
    assert b"0\ncurl: (7) Failed to connect" in server.log(job)
    assert server.client.get(f"/v1/jobs/{job}/network").json()["attempts"] == []


@pytest.mark.parametrize("network", ["nope", ["*"], {"allow": ["a b"]}, 5, {"deny": []}])
def test_a_network_that_cannot_be_meant_is_refused(server: Server, network: object) -> None:
    answer = server.client.post("/v1/jobs", json={"kind": "shell", "code": "x", "network": network})
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["code"] == "bad_request"


def test_the_network_comes_back_when_a_server_was_killed(server: Server, port: int) -> None:
    wait = "until [ -e go ]; do sleep 0.1; done"
    code = f"{asking(port)}; {wait}; until {asking(port)}; do sleep 0.2; done 2>/dev/null"
    job = server.submit(kind="shell", code=code, network="greeter")
    while b"welcome" not in server.log(job):
        time.sleep(0.05)
    deadline = time.monotonic() + 10
    while not server.client.get(f"/v1/jobs/{job}/network").json()["attempts"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.stop(signal.SIGKILL)
    server.start()
    # The step runs on by itself; only once the job was taken up is there a network again.
    while not _adopted(server, job):
        assert time.monotonic() < deadline + 60
        time.sleep(0.1)
    server.client.put(f"/v1/jobs/{job}/files", params={"path": "go"}, content=b"")

    assert server.end_of(job)["state"] == "succeeded"
    assert server.log(job) == b"welcomewelcome"
    told = server.client.get(f"/v1/jobs/{job}/network").json()["attempts"]
    assert [each["verdict"] for each in told] == ["allowed", "allowed"]


def _adopted(server: Server, job: str) -> bool:
    events = server.client.get(f"/v1/jobs/{job}/events").json()["events"]
    return any(event["kind"] == "machine" and event["body"]["adopted"] for event in events)


def test_bytes_are_bounded(server: Server, port: int) -> None:
    asked = {"presets": ["greeter"], "max_bytes": 400}
    code = f"for i in 1 2 3 4 5 6; do {asking(port)}; echo; done"
    job = server.submit(kind="shell", code=code, network=asked)
    server.end_of(job)
    assert b"has carried its 400 bytes" in server.log(job)
    told = server.client.get(f"/v1/jobs/{job}/network").json()["attempts"]
    assert {each["verdict"] for each in told} >= {"allowed", "refused"}
