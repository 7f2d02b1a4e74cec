"""What an operator sees of a real server: metrics, traces, a log, and no secret in any of them."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from leftovers import leftovers
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.parser import text_string_to_metric_families
from test_server import CLOCHE, KEY, Server

from postgres import postgres

IN_CODE = "a-secret-in-the-code"
IN_ENV = "a-secret-in-a-variable"
IN_OUTPUT = "a-secret-in-the-output"
T = TypeVar("T")


class Collector:
    """Takes in spans over OTLP/HTTP, as an operator's collector would."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.raw.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> list[Span]:
        return [
            span
            for raw in list(self.raw)
            for resource in ExportTraceServiceRequest.FromString(raw).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def trace_of(self, job_id: str) -> list[Span]:
        """Wait for a job's span; return the whole trace that it is part of, by start."""

        def wanted(span: Span) -> bool:
            return span.name == "job" and attributes(span)["job_id"] == job_id

        def found() -> list[Span]:
            spans = self.spans()
            traces = {span.trace_id for span in spans if wanted(span)}
            return [span for span in spans if span.trace_id in traces]

        return sorted(eventually(found), key=lambda span: span.start_time_unix_nano)


def attributes(span: Span) -> dict[str, object]:
    return {
        pair.key.removeprefix("cloche."): getattr(pair.value, str(pair.value.WhichOneof("value")))
        for pair in span.attributes
    }


def eventually(look: Callable[[], T], timeout_s: float = 15.0) -> T:
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return found


class Numbers:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def get(self, name: str, **labels: str) -> float:
        """Return a sample's value; 0 when there is none yet."""
        wanted = labels.items()
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and wanted <= sample.labels.items()
        ]
        return sum(found)


def scrape(server: Server) -> Numbers:
    answer = server.client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Numbers(answer.text)


def lines(data: Path) -> list[dict[str, str]]:
    """Return the server's log: every line of it is a JSON object."""
    return [json.loads(line) for line in (data / "server.log").read_text().splitlines()]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with contextlib.closing(Collector()) as collector:
        yield collector


@pytest.fixture(scope="module")
def server(data: Path, collector: Collector) -> Iterator[Server]:
    server = Server(
        data,
        CLOCHE_LOG_FORMAT="json",
        CLOCHE_LOG_LEVEL="DEBUG",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="100",
    )
    yield server
    assert server.stop() == 128 + signal.SIGTERM
    assert leftovers(data) == []


def run(server: Server, code: str, **request: object) -> str:
    job_id = server.submit(kind="shell", code=code, **request)
    server.end_of(job_id)
    return job_id


def test_the_numbers_tell_what_happened(server: Server) -> None:
    eventually(lambda: scrape(server).get("cloche_machines", use="ready") == 1)
    before = scrape(server)

    run(server, "true")
    run(server, "exit 3")
    run(server, "true", limits={"memory_mib": 512})

    after = scrape(server)

    def rise(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.get(name, **labels)

    assert rise("cloche_jobs_finished_total", state="succeeded", reason="done") == 2
    assert rise("cloche_jobs_finished_total", state="failed", reason="exit_code") == 1
    assert rise("cloche_jobs_finished_total") == 3
    # What the store is asked may be told again for a moment.
    failed = before.get("cloche_jobs", state="failed") + 1
    eventually(lambda: scrape(server).get("cloche_jobs", state="failed") == failed)
    assert rise("cloche_job_wait_seconds_count") == 3
    assert 0 < rise("cloche_job_wait_seconds_sum") < 10
    assert rise("cloche_job_run_seconds_count", state="succeeded") == 2
    assert rise("cloche_job_run_seconds_count", state="failed") == 1
    assert 0.01 < rise("cloche_job_run_seconds_sum") < 30
    # The second job may have come before the pool was full again; the third wanted another size.
    assert rise("cloche_machine_start_seconds_count", start="warm") >= 1
    assert rise("cloche_machine_start_seconds_count", start="cold") >= 1
    claimed = rise("cloche_machine_start_seconds_count") - rise(
        "cloche_machine_start_seconds_count", start="ahead"
    )
    assert claimed == 3
    asked = {"route": "/schedule", "method": "POST"}
    assert rise("cloche_http_requests_total", **asked, status="200") == 3
    assert rise("cloche_http_request_seconds_count", **asked) == 3
    assert rise("cloche_http_requests_total", route="/metrics", status="200") == 1
    assert after.get("cloche_store_errors_total") == after.get("cloche_pool_failures_total") == 0
    assert after.get("cloche_info", rung="container") == 1
    assert after.get("process_resident_memory_bytes") > 10_000_000


def test_what_runs_now_is_told(server: Server) -> None:
    job_id = server.submit(kind="shell", code="sleep 60")
    eventually(lambda: server.client.get(f"/v1/jobs/{job_id}").json()["machine"])

    eventually(lambda: scrape(server).get("cloche_jobs", state="running") == 1)
    # The machine of the last test's job may be about to go.
    eventually(lambda: scrape(server).get("cloche_machines", use="job") == 1)
    server.client.post(f"/v1/jobs/{job_id}/cancel")
    server.end_of(job_id)

    after = scrape(server)
    assert after.get("cloche_jobs_finished_total", state="cancelled", reason="cancelled") == 1
    eventually(lambda: scrape(server).get("cloche_machines", use="job") == 0)


def test_a_standing_sandbox_is_told(server: Server) -> None:
    made = server.client.post("/v1/sandboxes", json={})
    assert made.status_code == 201, made.text

    eventually(lambda: scrape(server).get("cloche_machines", use="sandbox") == 1)
    server.client.delete(f"/v1/sandboxes/{made.json()['id']}")
    eventually(lambda: scrape(server).get("cloche_machines", use="sandbox") == 0)


def test_a_scan_of_random_paths_makes_no_new_series(server: Server) -> None:
    def scan() -> None:
        for _ in range(100):
            word = secrets.token_hex(6)
            for path in (f"/{word}", f"/v1/{word}", f"/v1/jobs/{word}", f"/status/{word}/{word}"):
                for method in ("GET", "DELETE"):
                    server.client.request(method, path)

    scan()
    before = {(sample.name, *sample.labels.items()) for sample in scrape(server).samples}
    scan()
    after = {(sample.name, *sample.labels.items()) for sample in scrape(server).samples}

    assert after == before
    routes = {dict(key[1:]).get("route") for key in after if len(key) > 1} - {None}
    assert "other" in routes
    described = set(server.client.get("/openapi.json").json()["paths"])
    assert {str(route).replace(":path", "") for route in routes} <= described | {"other"}


def test_metrics_need_a_key_of_any_role_and_come_from_nowhere_else(server: Server) -> None:
    url = server.client.base_url.join("/metrics")
    made = server.client.post("/v1/keys", json={"tenant": "eyes", "role": "read-only"}).json()

    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": "Bearer nonsense"}).status_code == 401
    allowed = {"authorization": f"Bearer {made['key']}"}
    assert httpx.get(url, headers=allowed).status_code == 200
    assert httpx.get(url, headers={**allowed, "host": "evil.example"}).status_code == 403
    assert "eyes" not in httpx.get(url, headers=allowed).text, "a tenant is named"


def test_metrics_are_open_where_everything_is(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(tmp_path, CLOCHE_AUTH="off", CLOCHE_POOL_SIZE="0")
    try:
        answer = httpx.get(server.client.base_url.join("/metrics"))
        assert (answer.status_code, "cloche_jobs" in answer.text) == (200, True)
    finally:
        server.stop()


def test_a_job_is_one_trace_from_the_request_to_its_steps(
    server: Server, collector: Collector
) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    answer = server.client.post(
        "/schedule",
        json={
            "steps": [
                {"tool": "write_file", "path": "a.py", "content": f"print({IN_CODE!r})"},
                {"tool": "shell", "command": f"python3 a.py # {IN_CODE}"},
                {"tool": "shell", "command": "exit 3"},
            ],
            "env": {"TOKEN": IN_ENV},
        },
        headers={"traceparent": f"00-{trace_id}-{caller}-01"},
    )
    job_id = answer.json()["job_id"]
    server.end_of(job_id)

    spans = collector.trace_of(job_id)

    request, job, *parts = spans
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    assert (request.name, request.parent_span_id.hex()) == ("POST /schedule", caller)
    assert (request.kind, job.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CONSUMER)
    told = attributes(request)
    assert (told["http.route"], told["http.response.status_code"]) == ("/schedule", 200)
    assert (told["job_id"], told["tenant"]) == (job_id, "default")
    assert told["request_id"] == answer.headers["x-request-id"]
    assert (job.name, job.parent_span_id) == ("job", request.span_id)
    told = attributes(job)
    assert (told["state"], told["reason"], told["exit_code"]) == ("failed", "exit_code", 3)
    assert (told["job_id"], told["tenant"], told["attempt"]) == (job_id, "default", 1)
    names = ["machine", "step write_file", "step shell", "step shell", "artifacts"]
    assert [span.name for span in parts] == names
    assert {span.parent_span_id for span in parts} == {job.span_id}
    assert attributes(parts[0])["rung"] == "container"
    assert [attributes(span).get("step") for span in parts[1:4]] == [0, 1, 2]
    errors = [span.status.code == Status.STATUS_CODE_ERROR for span in (job, *parts)]
    assert errors == [True, False, False, False, True, False]


def test_a_job_without_a_callers_trace_starts_one(server: Server, collector: Collector) -> None:
    spans = collector.trace_of(run(server, "true"))

    assert [span.name for span in spans[:2]] == ["POST /schedule", "job"]
    assert spans[0].parent_span_id == b""


def test_a_job_that_never_started_says_so_in_its_span(server: Server, collector: Collector) -> None:
    spans = collector.trace_of(run(server, "true", min_rung="firecracker"))

    assert [span.name for span in spans] == ["POST /schedule", "job", "machine"]
    assert attributes(spans[1])["reason"] == "not_started"


def test_nobody_traces_health(server: Server, collector: Collector) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        server.client.get(path)
    collector.trace_of(run(server, "true"))

    names = " ".join(span.name for span in collector.spans())
    assert not re.search("healthz|readyz|metrics", names), names


def test_the_trace_goes_on_when_the_server_is_killed(
    tmp_path: Path, data: Path, collector: Collector
) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(
        tmp_path,
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{collector.url}/v1/traces",
        OTEL_BSP_SCHEDULE_DELAY="100",
        OTEL_SERVICE_NAME="named-by-the-operator",
    )
    try:
        job_id = server.submit(
            kind="shell", code="for n in 1 2 3 4 5 6; do echo $n; sleep 0.3; done"
        )
        eventually(lambda: server.log(job_id))
        time.sleep(0.5)  # The request's span is sent meanwhile.
        server.stop(signal.SIGKILL)
        server.start()
        assert server.end_of(job_id)["state"] == "succeeded"
        spans = collector.trace_of(job_id)
    finally:
        server.stop()

    request = spans[0]
    # The job's first span died with its server; what had ended before was sent.
    [job] = [span for span in spans if span.name == "job"]
    assert (request.name, job.parent_span_id) == ("POST /schedule", request.span_id)
    [machine] = [span for span in spans if span.parent_span_id == job.span_id][:1]
    assert (machine.name, attributes(machine)["adopted"]) == ("machine", True)
    assert any(b"named-by-the-operator" in raw for raw in collector.raw)


def test_a_collector_that_is_gone_stops_nothing(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(
        tmp_path,
        CLOCHE_LOG_FORMAT="json",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_BSP_SCHEDULE_DELAY="100",
    )
    job_id = server.submit(kind="shell", code="true")
    assert server.end_of(job_id)["state"] == "succeeded"
    began = time.monotonic()

    assert server.stop() == 128 + signal.SIGTERM

    assert time.monotonic() - began < 12
    assert any(line["logger"].startswith("opentelemetry") for line in lines(tmp_path))


def serve_and_fail(tmp_path: Path, prelude: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{prelude}\n{CLOCHE[2]}", "serve", "--port", "0"],
        env={**os.environ, "CLOCHE_DATA": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 125, done.stderr
    return done.stderr


def test_what_cannot_be_traced_is_said_at_the_start(tmp_path: Path) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    absent = "import sys; sys.modules['opentelemetry.sdk'] = None"

    assert "cloche[otel]" in serve_and_fail(tmp_path, absent, **endpoint)
    said = serve_and_fail(tmp_path, OTEL_EXPORTER_OTLP_PROTOCOL="grpc", **endpoint)
    assert "http/protobuf" in said


def test_without_a_collector_nothing_of_the_sdk_is_loaded() -> None:
    code = (
        "import asyncio, sys, cloche.serve\n"
        "from cloche.observe import traces\n"
        "async def main():\n"
        "    off = {'OTEL_EXPORTER_OTLP_ENDPOINT': 'x', 'OTEL_TRACES_EXPORTER': 'none'}\n"
        "    async with traces.exported({}), traces.exported(off):\n"
        "        pass\n"
        "asyncio.run(main())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_every_line_of_the_log_is_json_and_tells_what_it_is_about(
    server: Server, data: Path
) -> None:
    answer = server.client.post("/schedule", json={"kind": "shell", "code": "exit 3"})
    job_id = answer.json()["job_id"]
    server.end_of(job_id)

    log = eventually(lambda: [line for line in lines(data) if "failed" in line["message"]])
    mine = [line for line in lines(data) if line.get("job_id") == job_id]

    assert log[-1]["job_id"] == job_id
    messages = [line["message"] for line in mine]
    assert messages[0] == f"job {job_id}: accepted"
    assert messages[-1] == f"job {job_id}: failed, exit_code"
    assert {line["request_id"] for line in mine[:2]} == {answer.headers["x-request-id"]}
    assert {line["tenant"] for line in mine} == {"default"}
    assert re.fullmatch("[0-9a-f]{12}", mine[-1]["machine"])
    assert len({line["trace_id"] for line in mine}) == 1
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines(data))
    assert any(line["logger"] == "uvicorn.error" for line in lines(data))


@pytest.mark.parametrize("given", ["abc-123_X.y", None, "", "a b", "x" * 65, '"},{"', "ü"])
def test_a_request_has_an_id_and_keeps_a_sane_one(server: Server, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given.encode()}

    answer = server.client.get("/v1/jobs/none", headers=headers)

    shown = answer.headers["x-request-id"]
    assert answer.json()["request_id"] == shown
    assert (shown == given) == (given == "abc-123_X.y")
    assert re.fullmatch("[A-Za-z0-9._-]{1,64}", shown)


def test_a_caller_who_hangs_up_is_no_fault_of_ours(server: Server, data: Path) -> None:
    url = server.client.base_url
    with socket.create_connection((url.host, url.port or 0)) as caller:
        head = f"POST /schedule HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n"
        caller.sendall(f"{head}x-request-id: hasty\r\ncontent-length: 100\r\n\r\n{{".encode())
        time.sleep(0.2)

    mine = eventually(lambda: [line for line in lines(data) if line.get("request_id") == "hasty"])
    assert [line["level"] for line in mine] == ["debug"], mine
    assert scrape(server).get("cloche_http_requests_total", status="500") == 0


def test_readiness_says_more_and_names_nobody(server: Server) -> None:
    answer = httpx.get(server.client.base_url.join("/readyz")).json()

    assert answer.keys() == {"status", "rung", "jobs", "pool", "worker"}
    assert (answer["status"], answer["rung"]) == ("ready", "container")
    assert answer["worker"]["alive"] is True
    assert answer["worker"]["silent_s"] < 5
    assert 0 <= answer["pool"]["ready"] <= 1


def test_a_store_that_is_gone_is_told_and_the_other_numbers_still_are(
    tmp_path: Path, data: Path
) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    with postgres() as address:
        server = Server(tmp_path, CLOCHE_DATABASE=address, CLOCHE_POOL_SIZE="0")
        ready = server.client.get("/readyz").status_code
    try:
        # A count that was made before may be told again for a moment.
        eventually(lambda: server.client.get("/readyz").status_code == 503)
        refused = server.client.get("/readyz")
        numbers = scrape(server)
    finally:
        server.stop()

    assert ready == 200
    assert refused.json()["code"] == "store_unavailable"
    assert refused.json()["remedy"]
    assert numbers.get("cloche_store_errors_total") > 0
    assert not [sample for sample in numbers.samples if sample.name == "cloche_jobs"]


def test_no_secret_is_in_the_log_the_metrics_or_the_spans(
    server: Server, data: Path, collector: Collector
) -> None:
    made = server.client.post("/v1/keys", json={"tenant": "careful"}).json()["key"]
    headers = {"authorization": f"Bearer {made}"}
    code = f"import os, sys\nprint({IN_OUTPUT!r})\nsys.exit('{IN_CODE}' + os.environ['TOKEN'])"
    request = {
        "kind": "python",
        "code": code,
        "env": {"TOKEN": IN_ENV},
        "idempotency_key": "once",
    }
    base = server.client.base_url
    job_id = httpx.post(base.join("/schedule"), json=request, headers=headers).json()["job_id"]
    assert IN_ENV in str(server.end_of(job_id)["stderr"])
    # What is refused is told of, too.
    other = httpx.post(base.join("/v1/jobs"), json={**request, "priority": 1}, headers=headers)
    bad = httpx.post(base.join("/v1/jobs"), json={**request, "code": 1}, headers=headers)
    wrong = httpx.get(base.join("/v1/jobs"), headers={"x-api-key": made + "x"})
    assert [answer.status_code for answer in (other, bad, wrong)] == [409, 400, 401]

    collector.trace_of(job_id)
    seen = {
        "log": (data / "server.log").read_bytes(),
        "metrics": server.client.get("/metrics").content,
        "spans": b"".join(collector.raw),
    }
    for where, text in seen.items():
        for secret in (KEY, made, IN_CODE, IN_ENV, IN_OUTPUT):
            assert secret.encode() not in text, f"{secret} is in the {where}"
    assert job_id.encode() in seen["log"]
    assert job_id.encode() in seen["spans"]
