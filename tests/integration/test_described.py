"""The API does what its description says: real answers, held to the described schemas."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from leftovers import leftovers
from serving import Server

from described import against, strict


class Held:
    """A client that checks each answer against the description of its call."""

    def __init__(self, server: Server) -> None:
        self._client = server.client
        self._described = strict(server.client.get("/openapi.json").json())

    def __call__(self, method: str, path: str, **more: Any) -> httpx.Response:
        answer = self._client.request(method, path, **more)
        operation = self._operation(method.lower(), answer.request.url.path)
        status = str(answer.status_code)
        told = operation["responses"].get(status) or operation["responses"][f"{status[0]}XX"]
        kind = answer.headers.get("content-type", "")
        if not told.get("content"):
            assert not answer.content, f"{method} {path}: {status} with a body"
        elif "json" in kind:
            against(self._described, told["content"][kind]["schema"]).validate(answer.json())
        else:
            names = {name.partition(";")[0] for name in told["content"]}
            assert kind.partition(";")[0] in names, f"{method} {path}: {kind}"
        return answer

    def _operation(self, method: str, path: str) -> dict[str, Any]:
        # The longest one: `/files/list` and not `/{path}`.
        found = [
            (len(template), item[method])
            for template, item in self._described["paths"].items()
            if method in item and re.fullmatch(_pattern(template), path)
        ]
        assert found, f"{method} {path} is not described"
        return dict(max(found, key=lambda one: one[0])[1])


def _pattern(template: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: ".+" if m[1] == "path" else "[^/]+", template)


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    server = Server(data, CLOCHE_ALLOW_ADDRESSES='["127.0.0.1/32"]')
    yield server
    for sandbox in server.client.get("/v1/sandboxes").json()["sandboxes"]:
        server.client.delete(f"/v1/sandboxes/{sandbox['id']}")
    assert server.stop() == 128 + signal.SIGTERM
    assert leftovers(data) == []


@pytest.fixture
def call(server: Server) -> Held:
    return Held(server)


def test_jobs_in_both_dialects(server: Server, call: Held) -> None:
    wanted = {
        "steps": [{"tool": "shell", "command": "echo hello | tee hello.txt"}],
        "files": [{"path": "notes.txt", "content": "short"}],
        "limits": {"wall_s": 60},
        "labels": {"team": "blue"},
        "min_rung": "docker",
        "webhook": "http://127.0.0.1:9/none-listens",
        "idempotency_key": "once",
    }
    job_id = call("POST", "/v1/jobs", json=wanted).json()["id"]
    assert call("POST", "/v1/jobs", json=wanted).status_code == 200
    assert call("GET", f"/v1/jobs/{job_id}?wait=30").json()["state"] == "succeeded"
    assert call("GET", "/v1/jobs?label=team=blue").json()["jobs"]
    assert len(call("GET", f"/v1/jobs/{job_id}/events").json()["events"]) > 5
    call("GET", f"/v1/jobs/{job_id}/events", headers={"accept": "text/event-stream"})
    assert call("GET", f"/v1/jobs/{job_id}/logs").text == "hello\n"
    assert call("GET", f"/v1/jobs/{job_id}/artifacts").json()["files"]
    call("GET", f"/v1/jobs/{job_id}/artifacts.zip")
    call("GET", f"/v1/jobs/{job_id}/artifacts/hello.txt")
    assert call("GET", f"/v1/jobs/{job_id}/deliveries").json()["deliveries"]

    failing = {"kind": "shell", "code": "sleep 0.2; echo bad >&2; exit 3"}
    second = call("POST", "/schedule", json=failing).json()["job_id"]
    call("GET", f"/status/{second}")
    server.end_of(second)
    assert call("GET", f"/status?task_id={second}").json()["stderr"] == "bad\n"
    again = call("POST", f"/v1/jobs/{second}/retry").json()["id"]
    call("POST", f"/v1/jobs/{again}/cancel")
    server.end_of(again)
    call("GET", f"/v1/jobs/{again}")
    call("DELETE", f"/v1/jobs/{again}")
    assert call("GET", f"/v1/jobs/{again}").status_code == 404


def test_sandboxes_their_processes_and_their_files(call: Held) -> None:
    order = {"env": {"A": "b"}, "labels": {"team": "blue"}, "ttl_s": 600, "idle_s": 300}
    box = f"/v1/sandboxes/{call('POST', '/v1/sandboxes', json=order).json()['id']}"
    assert call("GET", box).json()["usage"]
    call("GET", "/v1/sandboxes")
    call("POST", f"{box}/keep-alive", json={"ttl_s": 900})

    assert call("POST", f"{box}/exec", json={"command": "echo hello"}).json()["stdout"] == "hello\n"
    code = {"language": "python", "code": "print(6*7)"}
    call("POST", f"{box}/code", json=code, headers={"accept": "text/event-stream"})
    call("POST", f"{box}/code", json=code)
    cat = {"argv": ["cat"], "background": True}
    process = f"{box}/processes/{call('POST', f'{box}/exec', json=cat).json()['id']}"
    call("GET", process)
    call("POST", f"{process}/stdin", content=b"fed")
    call("POST", f"{process}/signal", json={"number": 15})
    call("GET", f"{process}/output")
    assert call("GET", process).json()["running"] is False
    started = call("GET", f"{box}/processes").json()["processes"]
    # A machine from the pool has run a command before it was ours.
    assert len([one for one in started if one["argv"] != ["true"]]) == 4
    call("DELETE", process)

    call("POST", f"{box}/files/folder", json={"path": "app"})
    call("PUT", f"{box}/files?path=app/main.py", content=b"def main(): ...\n")
    call("POST", f"{box}/files/move", json={"path": "app/main.py", "to": "app/run.py"})
    assert call("GET", f"{box}/files/list?path=app").json()["entries"]
    call("GET", f"{box}/files/stat?path=app/run.py")
    assert call("GET", f"{box}/files/glob?pattern=**/*.py").json()["paths"]
    assert call("GET", f"{box}/files/grep?pattern=main").json()["matches"]
    call("GET", f"{box}/files?path=app/run.py")
    zipped = call("GET", f"{box}/files/archive?path=app").content
    call("GET", f"{box}/files/archive?path=app&format=tar")
    call("PUT", f"{box}/files/archive?path=copy", content=zipped)
    call("DELETE", f"{box}/files?path=app&recursive=true")
    assert call("GET", f"{box}/files/stat?path=app").status_code == 404

    call("POST", f"{box}/pause")
    assert call("GET", f"{box}/files/list").status_code == 409
    call("POST", f"{box}/resume")
    call("DELETE", box)
    assert call("GET", box).json()["state"] == "ended"


def test_keys_tenants_uploads_and_the_server_itself(call: Held) -> None:
    key = call("POST", "/v1/keys", json={"tenant": "acme", "name": "ci"}).json()
    call("GET", "/v1/keys")
    call("PUT", "/v1/tenants/acme/quota", json={"jobs": 5, "cpu_s": None})
    call("GET", "/v1/tenants/acme/quota")
    assert call("GET", "/v1/tenants").json()["tenants"]
    call("DELETE", "/v1/tenants/acme/quota")
    call("GET", "/v1/usage")
    call("DELETE", f"/v1/keys/{key['id']}")
    assert call("GET", "/v1/audit").json()["entries"]
    call("GET", "/v1/whoami")
    call("POST", "/v1/login-links", json={"role": "read-only"})
    call("GET", "/login?token=nonsense")
    call("GET", "/v1/webhooks/secret")

    upload = call("POST", "/v1/uploads", content=b"hello world").json()["id"]
    call("GET", f"/v1/uploads/{upload}")
    call("DELETE", f"/v1/uploads/{upload}")

    call("GET", "/healthz")
    call("GET", "/readyz")
    call("GET", "/metrics")
    assert call("GET", "/v1/jobs?limit=0").status_code == 400
