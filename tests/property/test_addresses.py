"""However a closed address is spelled or wrapped, it stays closed."""

from __future__ import annotations

import ipaddress
import socket

from hypothesis import given
from hypothesis import strategies as st

from cloche.core.addresses import Rules, is_public, literal
from cloche.core.webhook import parse_url

IPV4 = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
IPV6 = st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address)
CLOSED = st.sampled_from(
    ["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"]
).flatmap(
    lambda text: st.integers(0, ipaddress.ip_network(text).num_addresses - 1).map(
        lambda offset: ipaddress.IPv4Address(int(ipaddress.ip_network(text)[0]) + offset)
    )
)
NUMBER = st.sampled_from(["{}", "0{:o}", "0x{:x}", "0X{:X}", "000{:o}"])


@st.composite
def spellings(draw: st.DrawFn, addresses: st.SearchStrategy[ipaddress.IPv4Address]) -> str:
    """Spell an address in one to four numbers, each in any base."""
    value, parts = int(draw(addresses)), draw(st.integers(1, 4))
    numbers = [value >> 24 - 8 * place & 0xFF for place in range(parts - 1)]
    numbers.append(value & (1 << 8 * (5 - parts)) - 1)
    return ".".join(draw(NUMBER).format(number) for number in numbers)


@given(spellings(CLOSED))
def test_no_spelling_opens_a_closed_address(text: str) -> None:
    address = literal(text)
    assert address is not None
    assert not Rules().permit(address)
    in_a_url = literal(parse_url(f"http://{text}/").host or "")
    assert in_a_url == address


@given(spellings(IPV4))
def test_a_spelling_is_read_as_the_resolver_reads_it(text: str) -> None:
    (entry,) = socket.getaddrinfo(text, 80, type=socket.SOCK_STREAM)

    assert str(literal(text)) == entry[4][0]


@given(CLOSED)
def test_no_wrapping_opens_a_closed_address(address: ipaddress.IPv4Address) -> None:
    value = int(address)
    for wrapped in (
        value,
        0xFFFF << 32 | value,
        0x64FF9B << 96 | value,
        0x2002 << 112 | value << 80,
        0x20010000 << 96 | value,
    ):
        assert not Rules().permit(ipaddress.IPv6Address(wrapped)), ipaddress.IPv6Address(wrapped)


@given(IPV4 | IPV6)
def test_nothing_is_public_that_python_calls_private(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if is_public(address):
        inner = getattr(address, "ipv4_mapped", None) or address
        assert inner in ipaddress.ip_network("64:ff9b::/96") or not (
            inner.is_private or inner.is_multicast or inner.is_reserved or inner.is_loopback
        )
