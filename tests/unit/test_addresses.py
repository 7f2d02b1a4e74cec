"""Which addresses may be called, in every spelling there is."""

from __future__ import annotations

import ipaddress

import pytest

from cloche.core.addresses import Rules, is_public, literal, parse_range

REFUSED = """
    0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254
    168.63.129.16 169.254.0.1 169.254.169.254 169.254.170.2 172.16.0.1 172.31.255.255 192.0.0.1
    192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 192.168.255.255 198.18.0.1 198.19.255.255
    198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
    :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:7f00:1 ::ffff:10.0.0.1 ::ffff:169.254.169.254
    ::ffff:0:7f00:1 64:ff9b::127.0.0.1 64:ff9b::a00:1 64:ff9b:1::1 64:ff9b:1::808:808
    100::1 100:0:0:1::1 2001::1 2001:0:7f00:1:: 2001:2::1 2001:10::1 2001:20::1 2001:db8::1
    2002:7f00:1:: 2002:a00:1:: 2002:808:808:: 3fff::1 5f00::1
    fc00::1 fd00::1 fd00:ec2::254 fd20:ce::254 fe80::1 fe80::1%eth0 fe80::a9fe:a9fe fec0::1
    ff00::1 ff02::1 ff05::2 4000::1 8000::1 2606:4700::1%eth0
""".split()
PUBLIC = """
    1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0
    168.63.129.15 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0 192.167.255.255
    192.169.0.0 198.17.255.255 198.20.0.0 223.255.255.255
    2606:4700:4700::1111 2001:4860:4860::8888 2a00:1450::1 2001:200::1 2003::1
    ::ffff:8.8.8.8 64:ff9b::8.8.8.8
""".split()
LOOPBACK = """
    127.0.0.1 127.0.0.1. 127.1 127.0.1 2130706433 0x7f000001 0X7F.1 0177.0.0.1 017700000001
    0x7f.0x0.0x0.0x1 0177.0x0.0.1 [::ffff:127.0.0.1] ::ffff:7f00:1
""".split()


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_public_is_refused(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    assert not Rules().permit(text)


@pytest.mark.parametrize("text", PUBLIC)
def test_what_is_public_may_be_called(text: str) -> None:
    assert Rules().permit(text)


@pytest.mark.parametrize("text", ["", "localhost", "1.2.3", "1.2.3.4.5", "::1::", "0x7f000001"])
def test_what_is_no_address_is_refused(text: str) -> None:
    assert not Rules().permit(text)


@pytest.mark.parametrize("spelling", LOOPBACK)
def test_every_spelling_of_an_address_is_seen_through(spelling: str) -> None:
    address = literal(spelling)

    assert address is not None
    assert not Rules().permit(address)
    assert Rules((parse_range("127.0.0.0/8"),)).permit(address)


@pytest.mark.parametrize("name", ["localhost", "a.example", "1e100.net", "dead.beef", "", "x 1"])
def test_a_name_is_no_address(name: str) -> None:
    assert literal(name) is None


def test_an_operator_allows_what_he_names_and_no_more() -> None:
    rules = Rules((parse_range("10.1.0.0/16"), parse_range("fd00::/8")))

    for allowed in ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1", "8.8.8.8"):
        assert rules.permit(allowed), allowed
    for refused in ("10.2.0.1", "127.0.0.1", "fe80::1", "fc00::1"):
        assert not rules.permit(refused), refused


@pytest.mark.parametrize(
    "text", ["10.0.0.1/8", "10.0.0.0/33", "localhost", "", "::/129", 1.5, None]
)
def test_a_range_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_range(text)
