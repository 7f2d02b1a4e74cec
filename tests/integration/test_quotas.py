"""Quotas over HTTP: each refuses with what is used and what to do, and stores nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from leftovers import leftovers
from serving import Server, cloche

from cloche.api.gate import GUESSES

SLEEP = {"kind": "shell", "code": "sleep 60"}
QUICK = {"kind": "shell", "code": "true"}
NONSENSE = [{"jobs": -1}, {"colour": 1}, {"burst": 0}, {"cpu_s": "x"}]
OPEN: list[httpx.Client] = []


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    server = Server(data, CLOCHE_QUOTA='{"jobs": 50, "max_vcpus": 16}', CLOCHE_SLOTS="2")
    yield server
    server.stop()
    assert leftovers(data) == []


class Tenant:
    """A tenant with a key, and a quota that differs from the default."""

    def __init__(self, server: Server, name: str, **quota: float | None) -> None:
        self.name = name
        self._server = server
        made = server.client.post("/v1/keys", json={"tenant": name}).json()
        self.client = httpx.Client(
            base_url=server.client.base_url, headers={"x-api-key": made["key"]}, timeout=30
        )
        OPEN.append(self.client)
        self.allow(**quota)

    def allow(self, **quota: float | None) -> None:
        answer = self._server.client.put(f"/v1/tenants/{self.name}/quota", json=quota)
        assert answer.status_code == 200, answer.text

    def submit(self, request: dict[str, object]) -> httpx.Response:
        return self.client.post("/v1/jobs", json=request)

    def refused(self, request: dict[str, object], *, status: int = 429) -> httpx.Response:
        """Submit what must be refused, and see that nothing came of it."""
        before = self.jobs()
        answer = self.submit(request)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["remedy"]
        assert self.jobs() == before, "a refused job was stored"
        return answer

    def jobs(self) -> list[str]:
        return [job["id"] for job in self.client.get("/v1/jobs?limit=200").json()["jobs"]]

    def used(self) -> dict[str, float]:
        return dict(self.client.get("/v1/usage").json()["used"])

    def run(self, request: dict[str, object]) -> str:
        answer = self.submit(request)
        assert answer.status_code == 201, answer.text
        job_id = str(answer.json()["id"])
        self._server.end_of(job_id)
        return job_id

    def cancel_all(self) -> None:
        for job_id in self.jobs():
            self.client.post(f"/v1/jobs/{job_id}/cancel")
            self._server.end_of(job_id)


def test_a_tenant_at_its_quota_of_jobs_is_refused_and_another_is_not(server: Server) -> None:
    full, other = Tenant(server, "full", jobs=2), Tenant(server, "other", jobs=2)
    accepted = [full.submit(SLEEP) for _ in range(2)]

    problem = full.refused(SLEEP).json()

    assert (problem["code"], problem["quota"]) == ("quota_exceeded", "jobs")
    assert (problem["used"], problem["limit"]) == (2, 2)
    assert "2 jobs" in problem["detail"]
    assert full.client.post("/schedule", json=SLEEP).status_code == 429
    retried = full.client.post(f"/v1/jobs/{accepted[0].json()['id']}/retry")
    assert retried.status_code == 429
    assert other.submit(SLEEP).status_code == 201
    assert full.used()["jobs"] == 2

    full.client.post(f"/v1/jobs/{accepted[1].json()['id']}/cancel")
    server.end_of(accepted[1].json()["id"])

    assert full.submit(SLEEP).status_code == 201
    full.cancel_all()
    other.cancel_all()


def test_of_20_who_submit_at_once_exactly_the_5_places_are_given(server: Server) -> None:
    tenant = Tenant(server, "crowd", jobs=5)

    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: tenant.submit(SLEEP).status_code, range(20)))

    assert sorted(answers) == [201] * 5 + [429] * 15
    assert len(tenant.jobs()) == 5
    tenant.cancel_all()


def test_a_repeated_submit_is_answered_at_the_quota_too(server: Server) -> None:
    tenant = Tenant(server, "repeating", jobs=1)
    request = {**SLEEP, "idempotency_key": "k"}
    first = tenant.submit(request)

    again = tenant.submit(request)

    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    tenant.cancel_all()


def test_processor_time_is_used_up_by_what_ran(server: Server) -> None:
    tenant = Tenant(server, "burner")
    burn = "import time\nwhile time.process_time() < 1: pass"
    tenant.run({"kind": "python", "code": burn})
    # The host's count: the shell is not waited for, but what it started is counted.
    hidden = f"setsid python3 -c '{burn}' & sleep 1.6"
    tenant.run({"kind": "shell", "code": hidden})
    used = tenant.used()["cpu_s"]
    assert 1.7 < used < 5, used

    tenant.allow(cpu_s=1)
    answer = tenant.refused(QUICK)

    assert answer.json()["quota"] == "cpu_s"
    assert 0 < int(answer.headers["retry-after"]) <= 31 * 24 * 3600
    tenant.allow(cpu_s=1000)
    tenant.run(QUICK)


def test_the_processor_time_of_a_cancelled_job_counts(server: Server) -> None:
    tenant = Tenant(server, "quitter")
    job_id = tenant.submit({"kind": "python", "code": "while True: pass"}).json()["id"]
    while server.client.get(f"/v1/jobs/{job_id}").json()["machine"] is None:
        time.sleep(0.02)
    time.sleep(1)

    tenant.cancel_all()

    assert tenant.used()["cpu_s"] > 0.5


def test_storage_is_full_until_a_job_is_deleted(server: Server) -> None:
    tenant = Tenant(server, "hoarder", storage_mib=1)
    job_id = tenant.run({"kind": "shell", "code": "head -c 1500000 /dev/urandom > big"})
    assert tenant.used()["storage_bytes"] == 1_500_000

    problem = tenant.refused(QUICK).json()

    assert (problem["quota"], problem["limit"]) == ("storage_mib", 1)
    assert tenant.client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert tenant.used()["storage_bytes"] == 0
    tenant.run(QUICK)


def test_uploads_are_taken_while_there_is_room(server: Server) -> None:
    tenant = Tenant(server, "uploader", storage_mib=1)
    half = b"x" * (1 << 19)
    kept = [tenant.client.post("/v1/uploads", content=half) for _ in range(2)]
    assert [answer.status_code for answer in kept] == [201, 201]

    for content in (b"x", iter([b"x"])):
        refused = tenant.client.post("/v1/uploads", content=content)
        assert (refused.status_code, refused.json()["quota"]) == (429, "storage_mib")
    tenant.refused(QUICK)

    assert tenant.client.delete(f"/v1/uploads/{kept[0].json()['id']}").status_code == 204
    too_large = tenant.client.post("/v1/uploads", content=half + b"x")
    assert too_large.status_code == 429, "it would not fit"
    # Without a length there is no telling ahead; nothing of it stays all the same.
    unmeasured = tenant.client.post("/v1/uploads", content=iter([half, b"x"]))
    assert unmeasured.status_code == 429
    assert tenant.used()["storage_bytes"] == 1 << 19
    assert tenant.client.post("/v1/uploads", content=half).status_code == 201


@pytest.mark.parametrize(
    ("limit", "most", "asked"),
    [("vcpus", 1, 2), ("memory_mib", 512, 513), ("disk_mib", 512, 600), ("wall_s", 60, 61.5)],
)
def test_a_machine_over_the_quota_is_refused(
    server: Server, limit: str, most: int, asked: float
) -> None:
    tenant = Tenant(server, f"small-{limit}", **{f"max_{limit}": most})

    problem = tenant.refused({**QUICK, "limits": {limit: asked}}, status=403).json()

    assert problem["code"] == "limits_over_quota"
    assert f"{limit} <= {most}" in problem["remedy"]
    tenant.refused(QUICK, status=403)  # The default is larger as well.
    tenant.run({**QUICK, "limits": {limit: most}})


def test_a_tenant_at_its_quota_of_sandboxes_is_refused(server: Server) -> None:
    tenant = Tenant(server, "standing", sandboxes=1, max_memory_mib=512)
    order = {"limits": {"memory_mib": 256}}
    made = tenant.client.post("/v1/sandboxes", json=order)
    assert made.status_code == 201, made.text

    refused = tenant.client.post("/v1/sandboxes", json=order)
    large = tenant.client.post("/v1/sandboxes", json={})

    assert (refused.status_code, refused.json()["quota"]) == (429, "sandboxes")
    assert (large.status_code, large.json()["code"]) == (403, "limits_over_quota")
    assert tenant.used()["sandboxes"] == 1
    path = f"/v1/sandboxes/{made.json()['id']}"
    assert tenant.client.delete(path).status_code == 204
    again = tenant.client.post("/v1/sandboxes", json=order).json()["id"]
    tenant.client.delete(f"/v1/sandboxes/{again}")


def test_the_servers_default_holds_where_a_tenant_has_no_own(server: Server) -> None:
    tenant = Tenant(server, "usual")
    tenant.refused({**QUICK, "limits": {"vcpus": 17}}, status=403)

    tenant.allow(max_vcpus=None, jobs=3)
    usage = tenant.client.get("/v1/usage").json()
    assert (usage["quota"]["jobs"], usage["quota"]["max_vcpus"]) == (3, None)
    assert usage["tenant"] == "usual"
    assert usage["month"]["since"] < usage["month"]["until"]

    reset = server.client.delete("/v1/tenants/usual/quota").json()
    assert (reset["quota"]["jobs"], reset["overrides"]) == (50, {})


def test_a_key_that_asks_too_often_waits(server: Server) -> None:
    tenant, other = Tenant(server, "hasty", requests_per_s=2, burst=4), Tenant(server, "calm")
    answers = [tenant.client.get("/v1/whoami") for _ in range(6)]

    assert [answer.status_code for answer in answers[:4]] == [200] * 4
    refused = answers[-1]
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
    assert int(refused.headers["retry-after"]) == 1
    assert tenant.submit(QUICK).status_code == 429
    assert other.client.get("/v1/whoami").status_code == 200
    time.sleep(1.1)
    assert tenant.client.get("/v1/whoami").status_code == 200

    tenant.allow(requests_per_s=None)

    assert {tenant.client.get("/v1/whoami").status_code for _ in range(20)} == {200}


def test_only_admins_see_and_set_quotas(server: Server) -> None:
    tenant = Tenant(server, "nosy")
    for method, path in (
        ("GET", "/v1/tenants"),
        ("GET", "/v1/tenants/nosy/quota"),
        ("PUT", "/v1/tenants/nosy/quota"),
        ("DELETE", "/v1/tenants/nosy/quota"),
    ):
        body = {"jobs": 10**6} if method == "PUT" else None
        assert tenant.client.request(method, path, json=body).status_code == 403, (method, path)
    assert "nosy" in {
        entry["tenant"] for entry in server.client.get("/v1/tenants").json()["tenants"]
    }
    actions = {entry["action"] for entry in server.client.get("/v1/audit").json()["entries"]}
    assert "quota.set" in actions


@pytest.mark.parametrize(
    "body", [{"jobs": -1}, {"colour": 1}, {"burst": 0}, {"cpu_s": "x"}], ids=str
)
def test_a_quota_that_makes_no_sense_is_refused(server: Server, body: dict[str, object]) -> None:
    answer = server.client.put("/v1/tenants/odd/quota", json=body)

    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert server.client.get("/v1/tenants/odd/quota").json()["overrides"] == {}


def test_the_command_line_shows_and_sets_quotas(server: Server) -> None:
    set_ = cloche(server, "tenants", "quota", "blue", "--set", "jobs=7", "--set", "max_wall_s=1.5")
    assert set_.returncode == 0, set_.stderr
    assert "jobs: 7 (its own)  0 used" in set_.stdout

    cloche(server, "tenants", "quota", "blue", "--set", "sandboxes=none", "--set", "jobs=default")

    shown = json.loads(cloche(server, "tenants", "quota", "blue", "--json").stdout)
    assert shown["overrides"] == {"max_wall_s": 1.5, "sandboxes": None}
    listed = cloche(server, "tenants", "list").stdout
    assert "sandboxes=none, max_wall_s=1.5" in listed
    names = [
        t["tenant"]
        for t in json.loads(cloche(server, "tenants", "list", "--json").stdout)["tenants"]
    ]
    assert "blue" in names
    cloche(server, "tenants", "quota", "blue", "--reset")
    assert "blue" not in cloche(server, "tenants", "list").stdout
    wrong = cloche(server, "tenants", "quota", "blue", "--set", "jobs=many")
    assert (wrong.returncode, "NAME=NUMBER" in wrong.stderr) == (2, True)


def test_guessing_keys_is_slowed_down_but_keys_in_use_are_not(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(tmp_path, CLOCHE_POOL_SIZE="0")
    try:
        base = server.client.base_url.join("/v1/jobs")
        tenant = Tenant(server, "patient")
        assert tenant.client.get("/v1/jobs").status_code == 200

        def guess(number: int) -> int:
            secret = f"cloche_{number:012x}_" + "x" * 43
            return client.get(base, headers={"x-api-key": secret}).status_code

        with httpx.Client() as client:
            answers = [guess(number) for number in range(GUESSES + 30)]
            assert set(answers[:GUESSES]) == {401}
            assert answers.count(429) >= 20, answers
            session = client.get(base, headers={"cookie": "cloche_session=made-up"})
            assert session.status_code == 429
        assert tenant.client.get("/v1/jobs").status_code == 200
        assert server.client.get("/v1/jobs").status_code == 200
    finally:
        server.stop()
