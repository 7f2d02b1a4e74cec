"""Webhooks sent over real sockets to real receivers, and what keeps them off private ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from leftovers import leftovers
from serving import Server

from cloche.core.addresses import Rules, parse_range
from cloche.core.job import Outcome, Reason, Request, State
from cloche.core.outbox import Delivery, Fate
from cloche.jobs.outbound import NotAnswered, Outbound
from cloche.jobs.webhooks import Sender, key_of, new_secret, sign
from cloche.sandbox.lookup import Resolve
from cloche.stores.database import Database
from cloche.stores.outbox import Outbox
from cloche.stores.queue import Queue
from receiver import NEVER, Heard, Receiver

ROOT = Path(__file__).parents[2]
LOOPBACK = Rules((parse_range("127.0.0.0/8"),))
DONE = Outcome(state=State.SUCCEEDED, reason=Reason.DONE, exit_code=0)
SECRET = new_secret()
HOUR = timedelta(hours=1)


class Office:
    """A queue, and senders that empty its outbox."""

    def __init__(self, database: Database) -> None:
        self.queue = Queue(database)
        self.outbox = Outbox(database)

    @contextlib.asynccontextmanager
    async def sender(
        self, rules: Rules = LOOPBACK, *, name: str = "s1", resolve: Resolve | None = None
    ) -> AsyncIterator[None]:
        sender = Sender(self.outbox, Outbound(rules, resolve=resolve), name=name, secret=SECRET)
        running = asyncio.create_task(sender.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def over(self, url: str, tenant: str = "t") -> str:
        """Run a job to its end, that is to be told to `url`."""
        request = Request.model_validate({"kind": "shell", "code": "true", "webhook": url})
        job_id = (await self.queue.submit(tenant, request)).job.id
        await self.queue.acquire("w", lease=HOUR, limit=100, per_tenant=100)
        await self.queue.finish("w", job_id, DONE)
        return job_id

    async def fate(self, job_id: str, *, attempts: int = 1, timeout_s: float = 30.0) -> Delivery:
        """Wait until a job's delivery was tried so often."""
        async with asyncio.timeout(timeout_s):
            while (found := (await self.outbox.of_job(job_id))[0]).attempts < attempts:
                await asyncio.sleep(0.02)
        return found


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    database = await Database.open(f"sqlite:///{tmp_path}/jobs.db")
    yield Office(database)
    await database.close()


def verify(heard: Heard, secret: str = SECRET) -> None:
    """Check a call as a receiver would."""
    timestamp = int(heard.headers["webhook-timestamp"])
    assert abs(time.time() - timestamp) < 60
    expected = sign(key_of(secret), heard.headers["webhook-id"], timestamp, heard.body.decode())
    assert heard.headers["webhook-signature"] == expected
    assert heard.json["id"] == heard.headers["webhook-id"]


async def test_a_receiver_hears_and_can_verify(office: Office) -> None:
    async with Receiver().open() as receiver, office.sender():
        job_id = await office.over(receiver.url + "?a=1&b=%20#part")
        (heard,) = await receiver.hears()
        told = await office.fate(job_id)

    verify(heard)
    assert heard.path == "/hook?a=1&b=%20"
    assert heard.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert heard.headers["content-type"] == "application/json"
    assert heard.json["job"]["id"] == job_id
    assert (told.state, told.attempts, told.last_error) == (Fate.DELIVERED, 1, "")


async def test_a_receiver_that_fails_is_told_again_under_the_same_id(office: Office) -> None:
    receiver = Receiver("500 Internal Server Error", "200 OK")
    async with receiver.open(), office.sender():
        job_id = await office.over(receiver.url)
        failed = await office.fate(job_id)
        first, second = await receiver.hears(2)
        told = await office.fate(job_id, attempts=2)

    assert (failed.state, failed.last_error) == (Fate.PENDING, "answered 500")
    assert first.body == second.body
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert 1.5 < second.at - first.at < 6
    verify(second)
    assert told.state is Fate.DELIVERED


async def test_a_receiver_that_is_down_is_told_when_it_is_up(office: Office) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    receiver = Receiver()
    async with office.sender():
        job_id = await office.over(f"http://127.0.0.1:{port}/")
        refused = await office.fate(job_id)
        async with receiver.open(port=port):
            await receiver.hears()
            told = await office.fate(job_id, attempts=refused.attempts + 1)

    assert "no connection" in refused.last_error
    assert told.state is Fate.DELIVERED


async def test_a_receiver_may_ask_for_time(office: Office) -> None:
    receiver = Receiver("503 Service Unavailable\r\nretry-after: 1800")
    async with receiver.open(), office.sender():
        told = await office.fate(await office.over(receiver.url))

    assert told.next_at is not None
    assert told.last_at is not None
    assert 1795 < (told.next_at - told.last_at).total_seconds() < 1805


async def test_a_receiver_that_is_gone_for_good_is_left_alone(office: Office) -> None:
    async with Receiver("410 Gone").open() as receiver, office.sender():
        told = await office.fate(await office.over(receiver.url))

    assert (told.state, told.last_error) == (Fate.FAILED, "answered 410")


async def test_a_redirect_is_not_followed(office: Office) -> None:
    async with Receiver().open() as inside:
        answer = f"307 Temporary Redirect\r\nlocation: {inside.url}"
        async with Receiver(answer).open() as outside, office.sender():
            told = await office.fate(await office.over(outside.url))

    assert (told.state, told.last_error) == (Fate.PENDING, "answered 307")
    assert inside.heard == []


async def test_receivers_that_never_answer_hold_up_nobody(office: Office) -> None:
    async with contextlib.AsyncExitStack() as stack:
        deaf = [await stack.enter_async_context(Receiver(NEVER).open()) for _ in range(6)]
        good = await stack.enter_async_context(Receiver().open())
        for receiver in deaf:
            for _ in range(20):
                await office.over(receiver.url, tenant="loud")
        same, other = await office.over(good.url, "loud"), await office.over(good.url, "quiet")
        began = time.monotonic()
        await stack.enter_async_context(office.sender())
        await good.hears(2)
        fates = [await office.fate(job_id) for job_id in (same, other)]
        took_s = time.monotonic() - began

    assert {fate.state for fate in fates} == {Fate.DELIVERED}
    assert took_s < 5, "nobody waits for the deaf, their own tenant no more than another"
    assert all(len(receiver.heard) <= 4 for receiver in deaf)


async def test_a_call_that_is_not_answered_ends_in_time(office: Office) -> None:
    async with Receiver(NEVER).open() as receiver, office.sender():
        began = time.monotonic()
        told = await office.fate(await office.over(receiver.url))

    assert 9.5 < time.monotonic() - began < 13
    assert (told.state, told.last_error) == (Fate.PENDING, "no answer within 10 s")


async def test_an_answer_without_an_end_is_not_read(office: Office) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server, office.sender():
        began = time.monotonic()
        port = server.sockets[0].getsockname()[1]
        told = await office.fate(await office.over(f"http://127.0.0.1:{port}/"))

    assert told.state is Fate.DELIVERED
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200",
        b"\xff" * 1000,
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 99999,
    ],
    ids=["nothing", "half a line", "noise", "another protocol", "headers without an end"],
)
async def test_a_receiver_that_speaks_no_http_is_a_failed_try(office: Office, said: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(said)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server, office.sender():
        port = server.sockets[0].getsockname()[1]
        told = await office.fate(await office.over(f"http://127.0.0.1:{port}/"))

    assert told.state is Fate.PENDING
    assert told.last_error.startswith("the connection broke")


async def test_two_servers_do_not_send_the_same(office: Office) -> None:
    async with Receiver().open() as receiver:
        ids = [await office.over(receiver.url) for _ in range(30)]
        async with office.sender(name="s1"), office.sender(name="s2"):
            await receiver.hears(30)
            await asyncio.sleep(1)

    assert sorted(heard.json["job"]["id"] for heard in receiver.heard) == sorted(ids)


async def test_a_private_address_is_not_called(office: Office) -> None:
    async with Receiver().open() as receiver, office.sender(Rules()):
        told = await office.fate(await office.over(receiver.url))
        by_name = await office.fate(await office.over(f"http://localhost:{receiver.port}/"))

    assert receiver.heard == []
    for fate in (told, by_name):
        assert (fate.state, "may be called" in fate.last_error) == (Fate.PENDING, True)
        assert "127.0.0.1" not in fate.last_error, "what a name leads to is not told"


class Rebinding:
    """A name that leads to a public address when it is looked at, and inside when it is called."""

    def __init__(self) -> None:
        self.lookups = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.lookups += 1
        return ["127.0.0.2"] if self.lookups == 1 else ["127.0.0.1"]


async def test_a_name_is_looked_up_once_and_dialled_as_it_was_checked() -> None:
    resolve = Rebinding()
    rules = Rules((parse_range("127.0.0.2/32"),))
    async with Receiver().open() as inside:
        outbound = Outbound(rules, resolve=resolve)
        with pytest.raises(NotAnswered, match="no connection"):
            await outbound.post(f"http://rebind.test:{inside.port}/", b"", {})
        with pytest.raises(NotAnswered, match="may be called"):
            await outbound.post(f"http://rebind.test:{inside.port}/", b"", {})

    assert (resolve.lookups, inside.heard) == (2, [])


async def test_one_private_address_among_others_is_enough_to_refuse() -> None:
    async def mixed(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1", "10.0.0.1"]

    async with Receiver().open() as receiver:
        with pytest.raises(NotAnswered, match="may be called"):
            await Outbound(LOOPBACK, resolve=mixed).post(f"http://a.test:{receiver.port}/", b"", {})

    assert receiver.heard == []


async def test_the_next_address_is_tried_when_the_first_is_dead() -> None:
    async def two(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.9", "127.0.0.1"]

    async with Receiver().open() as receiver:
        answer = await Outbound(LOOPBACK, resolve=two).post(
            f"http://a.test:{receiver.port}/", b"", {}
        )

    assert answer.status == 204
    assert receiver.heard[0].headers["host"] == f"a.test:{receiver.port}"


async def test_a_name_that_nobody_knows_is_a_failed_try(office: Office) -> None:
    async with office.sender():
        told = await office.fate(await office.over("http://nowhere.invalid/"))

    assert told.last_error == "the host's name is not known"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for hooks.test, and its key, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=hooks.test"),
            *("-addext", "subjectAltName=DNS:hooks.test"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return both


async def test_tls_is_verified_against_the_name_and_not_the_address(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def here(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority)
    untrusting = Outbound(LOOPBACK, resolve=here)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    outbound = Outbound(LOOPBACK, resolve=here)
    async with Receiver().open(tls=tls) as receiver:
        answer = await outbound.post(f"https://hooks.test:{receiver.port}/", b"{}", {})
        for caller, host in ((outbound, "other.test"), (untrusting, "hooks.test")):
            with pytest.raises(NotAnswered, match="CERTIFICATE_VERIFY_FAILED"):
                await caller.post(f"https://{host}:{receiver.port}/", b"{}", {})

    assert answer.status == 204
    assert len(receiver.heard) == 1
    assert receiver.heard[0].headers["host"] == f"hooks.test:{receiver.port}"


@pytest.fixture
def folder(tmp_path: Path, data: Path) -> Iterator[Path]:
    (tmp_path / "images").symlink_to(data / "images")
    yield tmp_path
    assert leftovers(tmp_path) == []


async def test_a_server_that_is_killed_between_the_end_and_the_telling_still_tells(
    folder: Path,
) -> None:
    receiver = Receiver(NEVER, "200 OK")
    async with receiver.open():
        server = await asyncio.to_thread(Server, folder, CLOCHE_ALLOW_ADDRESSES='["127.0.0.0/8"]')
        try:
            job_id = await asyncio.to_thread(
                server.submit,
                kind="shell",
                code="echo SECRET",
                webhook={"url": receiver.url, "events": ["finished"]},
            )
            await receiver.hears(1)  # It has heard, but not answered.
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            await asyncio.to_thread(server.start)
            first, second = await receiver.hears(2)
            answer = server.client.get("/v1/webhooks/secret")
            secret = answer.json()["secret"]
            path = f"/v1/jobs/{job_id}/deliveries"
            async with asyncio.timeout(10):
                while (told := server.client.get(path).json()["deliveries"])[0][
                    "state"
                ] != "delivered":
                    await asyncio.sleep(0.05)
            missing = server.client.get(f"/v1/jobs/{'0' * 16}/deliveries")
        finally:
            await asyncio.to_thread(server.stop)

    verify(first, secret)
    verify(second, secret)
    assert first.body == second.body
    assert second.json["job"]["state"] == "succeeded"
    assert b"SECRET" not in second.body
    assert (told[0]["type"], told[0]["url"]) == ("job.finished", receiver.url)
    assert told[0]["attempts"] == 1
    assert answer.headers["cache-control"] == "no-store"
    assert missing.status_code == 404


def test_what_leads_inside_is_refused_at_once_and_the_secret_is_the_admins(folder: Path) -> None:
    secret = new_secret()
    server = Server(folder, CLOCHE_WEBHOOK_SECRET=secret, CLOCHE_MAX_WALL_S="100")
    try:
        for url in (
            *("http://127.0.0.1/", "http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/"),
            *("http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://169.254.169.254/latest"),
            *("http://10.1.2.3/", "http://[fd00::1]/", "ftp://a.example/", "http://u:p@a.example/"),
        ):
            request = {"kind": "shell", "code": "true", "webhook": url}
            answer = server.client.post("/v1/jobs", json=request)
            assert (answer.status_code, answer.json()["code"]) == (400, "bad_request"), url
            assert answer.json()["remedy"]
        key = server.client.post("/v1/keys", json={"role": "member"}).json()["key"]
        refused = server.client.get(
            "/v1/webhooks/secret", headers={"authorization": f"Bearer {key}"}
        )
        assert refused.status_code == 403
        shown = subprocess.run(
            [sys.executable, "-c", "from cloche.cli import main; main()", "webhooks", "secret"],
            env={**server._environment, "CLOCHE_URL": str(server.client.base_url)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (shown.returncode, shown.stdout) == (0, secret + "\n"), shown.stderr
        too_long = {"kind": "shell", "code": "true", "limits": {"wall_s": 101}}
        assert server.client.post("/v1/jobs", json=too_long).status_code == 400
        usual = server.client.post("/v1/jobs", json={"kind": "shell", "code": "true"}).json()
        assert usual["request"]["limits"] == {"wall_s": 100.0}
        assert server.end_of(usual["id"])["state"] == "succeeded"
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CLOCHE_WEBHOOK_SECRET", "too-short"),
        ("CLOCHE_ALLOW_ADDRESSES", "127.0.0.0/8"),
        ("CLOCHE_ALLOW_ADDRESSES", '["127.0.0.1/8"]'),
        ("CLOCHE_ALLOW_ADDRESSES", '["localhost"]'),
        ("CLOCHE_MAX_WALL_S", "0"),
        ("CLOCHE_MAX_SILENT_S", "-1"),
        ("CLOCHE_MAX_CPU_S", "much"),
    ],
)
def test_a_setting_that_makes_no_sense_is_told_at_the_start(
    folder: Path, name: str, value: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from cloche.cli import main; main()", "serve", "--port", "0"],
        env={**os.environ, "CLOCHE_DATA": str(folder), name: value},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 125, done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_documented_receiver_verifies_what_is_sent(office: Office) -> None:
    text = (ROOT / "docs/how-to/webhooks.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    documented = names["verify"]
    assert callable(documented)
    async with Receiver().open() as receiver, office.sender():
        await office.over(receiver.url)
        (heard,) = await receiver.hears()

    assert documented(SECRET, heard.headers, heard.body)
    assert not documented(new_secret(), heard.headers, heard.body)
    assert not documented(SECRET, heard.headers, heard.body + b" ")
    late = {**heard.headers, "webhook-timestamp": "1600000000"}
    assert not documented(SECRET, late, heard.body)
