"""The way out: a machine reaches what its policy names, and not by any trick anything else.

The machine is real, and so is the network behind the proxy: a small internet of our own,
in namespaces from which nothing leads on.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import internet as net
from cloche.core.addresses import Rules
from cloche.core.errors import PortTaken
from cloche.core.network import Attempt, Network, settle
from cloche.sandbox import egress as egress_module
from cloche.sandbox import outfit
from cloche.sandbox.dialling import Dialler
from cloche.sandbox.egress import Egress
from cloche.sandbox.sandbox import Sandbox
from internet import Internet, Names

from .conftest import MakeSandbox

PRESETS = {"corp": ["corp.example:80"]}
TABLE = {
    "site.example": (net.PUBLIC,),
    "other.example": (net.OTHER,),
    "six.example": (net.PUBLIC_V6,),
    "corp.example": (net.PRIVATE,),
    "inner.example": (net.PRIVATE,),
    "mixed.example": (net.PUBLIC, net.PRIVATE),
    "cloud.example": (net.METADATA,),
    "local.example": ("127.0.0.1",),
    "host.example": (net.OWN,),
    "rebinds.example": [(net.PUBLIC,), (net.PRIVATE,)],
}


@pytest.fixture(scope="module")
def world() -> Iterator[Internet]:
    with net.internet() as made:
        yield made


@pytest.fixture
def names() -> Names:
    return Names({name: list(found) if isinstance(found, list) else found
                  for name, found in TABLE.items()})  # fmt: skip


class Out:
    """A machine with a network, and what was told of it."""

    def __init__(self, sandbox: Sandbox, egress: Egress, told: list[Attempt]) -> None:
        self.sandbox = sandbox
        self.egress = egress
        self.told = told
        self.env = outfit.environment(egress.port, {}, certificates=False)

    async def curl(self, *arguments: str) -> str:
        """Run curl; return what the server said, and curl's own word on it."""
        argv = ["curl", "-sS", "-m", "10", "-w", "[%{http_code}]", *arguments]
        result = await self.sandbox.exec(argv, env=self.env, timeout_s=30)
        return result.stdout + result.stderr


@contextlib.asynccontextmanager
async def opened(
    sandbox: Sandbox, world: Internet, names: Names, asked: object
) -> AsyncIterator[Out]:
    policy = settle(Network.model_validate(asked), PRESETS)
    told: list[Attempt] = []
    dialler = Dialler(Rules(), resolve=names, connect=world.connect)
    async with Egress(sandbox, policy, dialler, tell=told.append) as egress:
        yield Out(sandbox, egress, told)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/away" in head.split(b"\r\n")[0]:
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: http://inner.example/\r\n"
                         b"content-length: 0\r\n\r\n")  # fmt: skip
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nwelcome")
        await writer.drain()
    writer.close()


@pytest.fixture(scope="module")
async def servers(world: Internet) -> AsyncIterator[None]:
    """Someone who greets at every address there is, the dialling host's own included."""
    async with contextlib.AsyncExitStack() as stack:
        for address in (net.PUBLIC, net.OTHER, net.PUBLIC_V6, net.PRIVATE, net.METADATA):
            for port in (80, 8080):
                await stack.enter_async_context(world.serving(greet, address, port))
        for address in (net.OWN, "127.0.0.1"):
            await stack.enter_async_context(world.serving(greet, address, 80, near=True))
        yield


@pytest.mark.usefixtures("servers")
class TestNames:
    async def test_what_is_named_is_reached_by_every_way(
        self, sandbox: Sandbox, world: Internet, names: Names
    ) -> None:
        async with opened(sandbox, world, names, ["site.example", "six.example"]) as out:
            assert await out.curl("http://site.example/") == "welcome[200]"
            assert await out.curl("http://six.example/") == "welcome[200]"
            assert await out.curl("-p", "http://site.example/") == "welcome[200]"
            socks = f"socks5h://127.0.0.1:{out.egress.port}"
            assert await out.curl("-x", socks, "http://site.example/") == "welcome[200]"
        assert [attempt.via for attempt in out.told] == ["http", "http", "connect", "socks5"]
        assert {attempt.verdict for attempt in out.told} == {"allowed"}
        assert all(attempt.bytes_down > 7 for attempt in out.told)

    async def test_what_is_not_named_is_not_even_looked_up(
        self, sandbox: Sandbox, world: Internet, names: Names
    ) -> None:
        async with opened(sandbox, world, names, ["site.example"]) as out:
            said = await out.curl("http://other.example/")
            await out.curl("http://secret-word.exfiltrated.example/")
        assert "does not allow other.example port 80" in said
        assert names.asked == [], "a lookup would carry data out"
        assert {attempt.verdict for attempt in out.told} == {"refused"}

    async def test_another_port_of_a_named_host_is_refused(
        self, sandbox: Sandbox, world: Internet, names: Names
    ) -> None:
        async with opened(sandbox, world, names, ["site.example"]) as out:
            assert "[403]" in await out.curl("http://site.example:8080/")
            assert "403" in await out.curl("-p", "http://site.example:8080/")
        assert [attempt.verdict for attempt in out.told] == ["refused", "refused"]

    @pytest.mark.parametrize(
        "host",
        [
            "inner.example", "mixed.example", "cloud.example", "local.example", "host.example",
            net.PRIVATE, net.METADATA, net.OWN, "127.0.0.1", "127.1", "2130706433", "0x7f000001",
            "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:10.77.0.10]",
            "[64:ff9b::a4d:a]", "0.0.0.0", "0", "localhost", "10.77.10", "0x0a4d000a",
        ],
    )  # fmt: skip
    async def test_no_spelling_leads_to_what_is_not_public(
        self, sandbox: Sandbox, world: Internet, names: Names, host: str
    ) -> None:
        asked = b"GET http://%b/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % host.encode()
        async with opened(sandbox, world, names, "all-public") as out:
            code = (
                "import socket,sys;c=socket.create_connection(('127.0.0.1',3128));"
                "c.sendall(sys.stdin.buffer.read());print(c.makefile().read())"
            )
            result = await sandbox.exec(["python3", "-c", code], stdin=asked)
        assert "welcome" not in result.stdout
        assert result.stdout.startswith(("HTTP/1.1 403", "HTTP/1.1 502")), result.stdout
        assert [attempt.bytes_up for attempt in out.told] == [0]

    async def test_a_name_of_the_operators_may_be_private_on_its_own_port(
        self, sandbox: Sandbox, world: Internet, names: Names
    ) -> None:
        async with opened(sandbox, world, names, "corp") as out:
            assert await out.curl("http://corp.example/") == "welcome[200]"
            assert "[403]" in await out.curl("http://corp.example:8080/")
        async with opened(sandbox, world, names, ["corp.example"]) as out:
            assert "[403]" in await out.curl("http://corp.example/"), "a caller cannot vouch"

    async def test_a_name_that_is_pointed_elsewhere_gains_nothing(
        self, sandbox: Sandbox, world: Internet, names: Names
    ) -> None:
        async with opened(sandbox, world, names, ["rebinds.example"]) as out:
            before = len(world.dialled)
            assert await out.curl("http://rebinds.example/") == "welcome[200]"
            assert world.dialled[before:] == [net.PUBLIC]
            assert names.asked == ["rebinds.example"], "looked up once for a connection"
            assert "[403]" in await out.curl("http://rebinds.example/")
            assert world.dialled[before:] == [net.PUBLIC], "and the second was never dialled"

    async def test_a_redirect_is_a_new_question(
        self, sandbox: Sandbox, world: Internet, names: Names
    ) -> None:
        async with opened(sandbox, world, names, "all-public") as out:
            said = await out.curl("-L", "http://site.example/away")
        assert "[403]" in said
        assert "welcome" not in said
        assert [attempt.verdict for attempt in out.told] == ["allowed", "refused"]

    async def test_there_is_no_way_around_the_proxy(
        self, sandbox: Sandbox, world: Internet, names: Names
    ) -> None:
        async with opened(sandbox, world, names, "all-public") as out:
            direct = await out.curl("--noproxy", "*", f"http://{net.PUBLIC}/")
            lookup = await out.curl("--noproxy", "*", "http://site.example/")
            links = (await sandbox.exec(["cat", "/proc/net/dev"])).stdout.splitlines()[2:]
        assert "Failed to connect" in direct or "unreachable" in direct, direct
        assert "Could not resolve" in lookup, lookup
        assert [link.split(":")[0].strip() for link in links] == ["lo"]
        assert out.told == []

    async def test_when_the_network_is_taken_away_nobody_listens(
        self, sandbox: Sandbox, world: Internet, names: Names
    ) -> None:
        async with opened(sandbox, world, names, ["site.example"]) as out:
            await out.curl("http://site.example/")
        assert "Failed to connect to 127.0.0.1 port 3128" in await out.curl("http://site.example/")
        async with opened(sandbox, world, names, ["site.example"]) as out:
            assert await out.curl("http://site.example/") == "welcome[200]", "and it can come back"


async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo for as long as the other side likes."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


HOLD = """
import socket, sys
c = socket.create_connection(("127.0.0.1", 3128))
c.sendall(b"CONNECT %b:7000 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" % sys.argv[1].encode())
c.recv(1000)
c.sendall(b"hello")
print(c.recv(100), flush=True)
print("then", c.recv(100))
"""


async def test_a_new_policy_holds_at_once_and_cuts_what_it_does_not_allow(
    sandbox: Sandbox, world: Internet, names: Names
) -> None:
    async with (
        world.serving(hold, net.PUBLIC, 7000),
        world.serving(hold, net.OTHER, 7000),
        opened(sandbox, world, names, ["site.example:7000", "other.example:7000"]) as out,
    ):
        cut = asyncio.create_task(sandbox.exec(["python3", "-c", HOLD, "site.example"]))
        kept = asyncio.create_task(sandbox.exec(["python3", "-c", HOLD, "other.example"]))
        while out.egress.open_connections < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        out.egress.change(settle(Network.model_validate(["other.example:7000"]), {}))
        result = await asyncio.wait_for(cut, 5)
        assert out.egress.open_connections == 1
        assert "[403]" in await out.curl("http://site.example:7000/")
    await asyncio.wait_for(kept, 10)
    assert result.stdout.startswith("b'hello'\nthen b''") or "Reset" in result.stderr
    assert [(attempt.name, attempt.verdict) for attempt in out.told] == [
        ("site.example", "cut"),
        ("site.example", "refused"),
        ("other.example", "cut"),
    ]


async def test_a_connection_that_carries_nothing_is_cut(
    sandbox: Sandbox, world: Internet, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_module, "IDLE_S", 1.0)
    async with (
        world.serving(hold, net.PUBLIC, 7000),
        opened(sandbox, world, names, ["site.example:7000"]) as out,
    ):
        await sandbox.exec(["python3", "-c", HOLD, "site.example"], timeout_s=20)
    assert [attempt.reason for attempt in out.told] == ["nothing was sent for 1 s"]


async def test_a_program_on_the_proxys_port_is_told(
    make_sandbox: MakeSandbox, world: Internet, names: Names
) -> None:
    sandbox = await make_sandbox()
    squatter = await sandbox.start(["python3", "-m", "http.server", "3128"])
    for _ in range(50):
        with contextlib.suppress(Exception):
            (await sandbox.tunnel(port=3128))[1].close()
            break
        await asyncio.sleep(0.1)
    with pytest.raises(PortTaken):
        async with opened(sandbox, world, names, ["site.example"]):
            pass
    await squatter.kill()


MANY = """
import asyncio, hashlib, os
async def one(n):
    r, w = await asyncio.open_connection("127.0.0.1", 3128)
    w.write(b"CONNECT site.example:7000 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    await r.readuntil(b"\\r\\n\\r\\n")
    ready.append(n)
    while len(ready) < 490: await asyncio.sleep(0.05)
    data = os.urandom(1 << 16)
    w.write(data); w.write_eof()
    back = await r.read()
    w.close()
    return back == data
ready = []
async def main():
    print(sum(await asyncio.gather(*map(one, range(500)))))
asyncio.run(main())
"""


def _rss_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


async def test_five_hundred_connections_at_once(
    make_sandbox: MakeSandbox, world: Internet, names: Names
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    sandbox = await make_sandbox(memory_mib=1024)
    try:
        async with (
            world.serving(hold, net.PUBLIC, 7000),
            opened(sandbox, world, names, ["site.example:7000"]) as out,
        ):
            grown = []
            for _ in range(2):
                began, before = time.monotonic(), _rss_kib()
                result = await sandbox.exec(
                    ["bash", "-c", "ulimit -n 2048; exec python3 -"],
                    stdin=MANY.encode(),
                    timeout_s=60,
                )
                grown.append(_rss_kib() - before)
                assert result.stdout == "500\n", result.stderr
                assert time.monotonic() - began < 50
            assert grown[1] < 20_000, f"KiB, after {grown[0]} for the first 500"
        assert len(out.told) == 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_connections_beyond_the_limit_wait_their_turn(
    sandbox: Sandbox, world: Internet, names: Names
) -> None:
    most = 0
    here = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most, here
        here += 1
        most = max(most, here)
        await asyncio.sleep(0.05)
        await greet(reader, writer)
        here -= 1

    asked = {"allow": ["site.example:7000"], "max_connections": 3}
    async with (
        world.serving(count, net.PUBLIC, 7000),
        opened(sandbox, world, names, asked) as out,
    ):
        # Each into a file: what several write at once to one pipe may be mixed.
        many = """
            mkdir -p many && cd many
            seq 20 | xargs -P 20 -I{} sh -c '
                curl -sS -m 20 -o {} -w "%{size_download}:%{exitcode}" \
                    http://site.example:7000/ > {}.how'
            for i in $(seq 20); do echo "$(cat $i):$(cat $i.how)"; done
        """
        result = await sandbox.exec(["bash", "-c", many], env=out.env, timeout_s=60)
    assert sorted(result.stdout.split()) == ["welcome:7:0"] * 20, result.stderr
    assert most <= 3
