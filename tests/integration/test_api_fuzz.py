"""The API by its own description: whatever is sent, the answer is never a fault of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from leftovers import leftovers
from serving import KEY, Server

from cloche.api.server import description

schema = schemathesis.openapi.from_dict(description())

ENDLESS = ("/files/watch",)
"""Streams without an end: they are tested where they are read."""
ENDING = ("/pause", "/cancel")
"""Calls that would leave nothing to try the next one on."""


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    server = Server(data, CLOCHE_SLOTS="2")
    yield server
    jobs = server.client.get("/v1/jobs?limit=200&state=queued&state=running").json()["jobs"]
    for job in jobs:
        server.client.post(f"/v1/jobs/{job['id']}/cancel")
    for job in jobs:
        server.end_of(job["id"])
    for sandbox in server.client.get("/v1/sandboxes?limit=1000").json()["sandboxes"]:
        server.client.delete(f"/v1/sandboxes/{sandbox['id']}")
    server.stop()
    said = (data / "server.log").read_text()
    assert "Traceback" not in said, said[-4000:]
    assert leftovers(data) == []


@pytest.fixture(scope="module")
def real(server: Server) -> dict[str, str]:
    """Ids of things that are there."""
    job_id = server.submit(kind="shell", code="echo hello > left.txt", keep_alive_s=3600)
    server.end_of(job_id)
    sandbox_id = server.client.post("/v1/sandboxes", json={}).json()["id"]
    run = {"argv": ["true"]}
    process_id = server.client.post(f"/v1/sandboxes/{sandbox_id}/exec", json=run).json()["process"]
    return {"job_id": job_id, "sandbox_id": sandbox_id, "process_id": process_id}


@schema.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_no_call_makes_the_server_fail(
    case: schemathesis.Case, server: Server, real: dict[str, str]
) -> None:
    check(case, server)
    known = real.keys() & case.path_parameters.keys()
    if known and case.method != "DELETE" and not case.path.endswith(ENDLESS + ENDING):
        case.path_parameters |= {name: real[name] for name in known}
        check(case, server)


def check(case: schemathesis.Case, server: Server) -> None:
    answer = case.call(
        base_url=str(server.client.base_url),
        headers={"authorization": f"Bearer {KEY}", "host": "localhost"},
        timeout=60,
    )

    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        problem = answer.json()
        assert answer.headers["content-type"] == ["application/problem+json"]
        assert problem["code"]
        assert problem["remedy"]
