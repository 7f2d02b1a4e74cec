"""The network: a machine has its own loopback, and nothing else to send on.

Addresses of others are tried from inside alone, and only once both sides agree
that the machine has no way to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche.core.errors import NoSuchFile, PathRefused, PortClosed
from cloche.sandbox.sandbox import Sandbox

from . import probe
from .conftest import MakeSandbox

METADATA = ["169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "fd00:ec2::254"]
PRIVATE = ["10.0.0.1", "172.17.0.1", "192.168.0.1", "192.168.122.1", "fe80::1", "224.0.0.251"]


@pytest.fixture
async def sealed(sandbox: Sandbox) -> Sandbox:
    """A machine that is known to have loopback alone, before anything is sent from it."""
    links, routes = await probe.ask(
        sandbox,
        """
        links = [line.split(":")[0].strip() for line in read("/proc/net/dev").splitlines()[2:]]
        answer([links, read("/proc/net/route").splitlines()[1:]])
        """,
    )
    seen = Path(f"/proc/{probe.first_pid(sandbox)}/net/dev").read_text().splitlines()[2:]
    assert links == ["lo"], f"not sealed, and so nothing was sent: {links}"
    assert [line.split(":")[0].strip() for line in seen] == ["lo"], seen
    assert routes == [], f"not sealed, and so nothing was sent: {routes}"
    return sandbox


class Visitors:
    """A server on the host that counts who comes."""

    def __init__(self) -> None:
        self.count = 0

    async def greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        writer.close()


@pytest.fixture
async def visitors() -> AsyncIterator[tuple[Visitors, int, str]]:
    """Serve on the host's loopback and on an abstract socket; yield the port and the name."""
    visitors = Visitors()
    name = f"cloche-test-{secrets.token_hex(8)}"
    server = await asyncio.start_server(visitors.greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    abstract = await asyncio.start_unix_server(visitors.greet, f"\0{name}")
    yield visitors, port, name
    for each in (server, abstract):
        each.close()
        await each.wait_closed()


CONNECT = """
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(3)
        client.connect(address)
"""


async def test_the_hosts_loopback_is_not_the_machines(
    sealed: Sandbox, visitors: tuple[Visitors, int, str]
) -> None:
    counter, port, name = visitors
    said = await probe.ask(
        sealed,
        CONNECT
        + """
port, name = given["port"], given["name"]
said = {address: attempt(connect, socket.AF_INET, (address, port))
        for address in ("127.0.0.1", "127.0.1.1", "127.255.255.254", "0.0.0.0", "localhost")}
said["::1"] = attempt(connect, socket.AF_INET6, ("::1", port))
said["::ffff:127.0.0.1"] = attempt(connect, socket.AF_INET6, ("::ffff:127.0.0.1", port))
said["abstract"] = attempt(connect, socket.AF_UNIX, "\\0" + name)
with socket.socket() as server:
    server.bind(("127.0.0.1", port)), server.listen()
    said["own"] = attempt(connect, socket.AF_INET, ("127.0.0.1", port))
answer(said)
""",
        port=port,
        name=name,
    )
    ours, theirs = await asyncio.open_connection("127.0.0.1", port)
    await ours.read()
    theirs.close()

    assert said.pop("own") == "ok", "the probe cannot connect to anything"
    assert set(said.values()) == {"ECONNREFUSED"}, said
    assert counter.count == 1, "the host's server counts only our own visit"


async def test_a_socket_file_of_the_host_is_not_there(sealed: Sandbox, data: Path) -> None:
    channel = data / "machines" / sealed.id / "guest.sock"
    assert channel.is_socket(), "this is where the machine's own channel lies"

    said = await probe.ask(
        sealed,
        CONNECT
        + """
answer({path: attempt(connect, socket.AF_UNIX, path) for path in given["paths"]})
""",
        paths=[
            str(channel),
            "/run/docker.sock",
            "/run/containerd/containerd.sock",
            "/run/dbus/system_bus_socket",
            "/run/systemd/private",
        ],
    )

    assert "ok" not in said.values(), said


@pytest.mark.parametrize("address", [*METADATA, *PRIVATE])
async def test_no_other_address_is_reachable(sealed: Sandbox, address: str) -> None:
    said = await probe.ask(
        sealed,
        CONNECT
        + """
family = socket.AF_INET6 if ":" in given["address"] else socket.AF_INET
def send():
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", (given["address"], 53))
answer([attempt(connect, family, (given["address"], 80)), attempt(send)])
""",
        address=address,
    )

    assert set(said) <= {"ENETUNREACH", "EINVAL", "EADDRNOTAVAIL"}, said


async def test_no_name_is_resolved(sealed: Sandbox) -> None:
    said = await probe.ask(
        sealed,
        """
        def resolve(name):
            try:
                return [entry[4][0] for entry in socket.getaddrinfo(name, 80)]
            except socket.gaierror as error:
                return error.errno
        answer([resolve("metadata.google.internal"), resolve("example.com"), resolve("localhost")])
        """,
    )

    assert isinstance(said[0], int), said
    assert isinstance(said[1], int), said
    assert "127.0.0.1" in said[2], "the probe resolves nothing at all"


async def test_no_packet_can_be_made_by_hand(sealed: Sandbox) -> None:
    said = await probe.ask(
        sealed,
        """
        def make(*arguments):
            socket.socket(*arguments).close()
        answer({
            "raw": attempt(make, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
            "raw icmp": attempt(make, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
            "raw 6": attempt(make, socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
            "packet": attempt(make, socket.AF_PACKET, socket.SOCK_RAW, 0x0300),
            "packet datagram": attempt(make, socket.AF_PACKET, socket.SOCK_DGRAM, 0x0300),
            "old packet": attempt(make, socket.AF_INET, 10, 0x0300),
            "vsock": attempt(make, 40, socket.SOCK_STREAM),
            "crypto": attempt(make, 38, socket.SOCK_SEQPACKET),
            "bluetooth": attempt(make, 31, socket.SOCK_RAW, 1),
            "key management": attempt(make, 15, socket.SOCK_RAW, 2),
            "plain": attempt(make, socket.AF_INET, socket.SOCK_STREAM),
        })
        """,
    )

    assert said.pop("plain") == "ok"
    assert set(said.values()) <= {"EPERM", "ENOSYS"}, said


async def test_the_machines_own_network_cannot_be_changed(sealed: Sandbox) -> None:
    """What netlink, which programs need to list interfaces, must not do."""
    said = await probe.shell(
        sealed,
        """
        ip link set lo down && echo CHANGED
        ip link add made type dummy && echo CHANGED
        ip link add a type veth peer name b && echo CHANGED
        ip address add 169.254.169.254/32 dev lo && echo CHANGED
        ip route add default dev lo && echo CHANGED
        ip netns add made && echo CHANGED
        ip link show
        """,
    )

    assert "LOOPBACK,UP" in said, "the probe cannot list even loopback"
    assert "CHANGED" not in said


async def test_machines_do_not_meet(make_sandbox: MakeSandbox) -> None:
    server, client = await make_sandbox(), await make_sandbox()
    name = f"cloche-test-{secrets.token_hex(8)}"
    serve = """
import socket, time
tcp, local = socket.socket(), socket.socket(socket.AF_UNIX)
tcp.bind(("0.0.0.0", 45678)), tcp.listen()
local.bind("\\0NAME"), local.listen()
print("ready", flush=True)
time.sleep(60)
""".replace("NAME", name)
    running = await server.start(["python3", "-c", serve])
    async with contextlib.aclosing(running.output()) as chunks:
        assert (await anext(chunks)).data == b"ready\n"

    ask = (
        CONNECT
        + """
answer([attempt(connect, socket.AF_INET, ("127.0.0.1", 45678)),
        attempt(connect, socket.AF_UNIX, "\\0" + given["name"])])
"""
    )
    within = await probe.ask(server, ask, name=name)
    across = await probe.ask(client, ask, name=name)
    _, writer = await server.tunnel(port=45678)
    writer.close()
    with pytest.raises(PortClosed):
        await client.tunnel(port=45678)

    assert within == ["ok", "ok"], "the server is not there to be reached"
    assert across == ["ECONNREFUSED", "ECONNREFUSED"]


async def test_a_tunnel_leads_into_the_machine_and_not_to_the_host(
    sealed: Sandbox, visitors: tuple[Visitors, int, str], tmp_path: Path
) -> None:
    counter, port, _ = visitors
    path = tmp_path / "host.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        with pytest.raises(PortClosed):
            await sealed.tunnel(port=port)
        for spelling in (f"{path}", f"/workspace/../..{path}", f"/proc/1/root{path}"):
            with pytest.raises((NoSuchFile, PathRefused)):
                await sealed.tunnel(unix=spelling)
        with pytest.raises(BlockingIOError):
            listener.accept()

    assert counter.count == 0
