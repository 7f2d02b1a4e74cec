"""What a machine may connect to, as it is asked for, and what comes of it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cloche.core.addresses import Rules, parse_range
from cloche.core.errors import BadRequest
from cloche.core.network import Network, Policy, decide, settle
from cloche.sandbox.registries import read_npm, read_pip, without_secrets

PRESETS = {"packages": ["index.example:443"], "db": ["db.corp.example:5432", "10.1.0.0/16:5432"]}


def policy(value: object) -> Policy:
    return settle(Network.model_validate(value), PRESETS)


def test_nothing_is_allowed_unless_it_is_said() -> None:
    assert policy("none").closed
    assert policy({}).closed
    assert policy([]).closed
    assert not decide(policy("none"), "example.org", 443).allowed


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        ("*", "means every host"),
        ("*.com", "registry"),
        ("*.co.uk", "registry"),
        ("*.", "no host"),
        ("a*.example.org", "no host"),
        ("*example.org", "elsewhere"),
        ("*.*.example.org", "no host"),
        ("user@example.org", "URL"),
        ("https://example.org", "URL"),
        ("example.org/path", "no address or range"),
        ("example.org?x", "URL"),
        ("example.org:0", "port"),
        ("example.org:65536", "port"),
        ("example.org:", "port"),
        ("example.org:+80", "port"),
        ("example.org:80:80", "no host"),
        ("10.0.0.0/33", "no address or range"),
        ("10.0.0.1/8", "no address or range"),
        ("0.0.0.0/0", "everything"),
        ("::/0", "everything"),
        ("[::1", "brackets"),
        ("999.1.1.1", "neither"),
        ("1.2.3.4.5", "neither"),
        ("exa mple.org", "no host"),
        ("-a.example", "no host"),
        ("b\u00fccher.example", "xn--"),
        ("a" * 64 + ".example", "no host"),
        ("", "at least 1"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(pattern: str, wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        Network.model_validate([pattern])


@pytest.mark.parametrize(
    "value",
    [
        ["a.example"] * 201,
        {"allow": ["a.example"], "deny": []},
        {"presets": ["none"]},
        {"presets": ["No Such"]},
        {"max_connections": 0},
        {"max_connections": 1001},
        {"max_connections": "5"},
        {"max_bytes": 0},
        7,
        "",
    ],
)
def test_what_is_malformed_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        Network.model_validate(value)


def test_an_unknown_preset_is_told_with_those_there_are() -> None:
    with pytest.raises(BadRequest, match="'nope'") as caught:
        policy("nope")
    assert "all-public, db, none, packages" in caught.value.remedy


@pytest.mark.parametrize(
    ("asked", "name", "port", "allowed"),
    [
        (["example.org"], "example.org", 443, True),
        (["example.org"], "EXAMPLE.org.", 80, True),
        (["Example.ORG."], "example.org", 80, True),
        (["example.org"], "example.org", 22, False),
        (["example.org:22"], "example.org", 22, True),
        (["example.org:22"], "example.org", 443, False),
        (["example.org:*"], "example.org", 9999, True),
        (["example.org"], "www.example.org", 443, False),
        (["example.org"], "example.org.evil.example", 443, False),
        (["*.example.org"], "a.b.example.org", 443, True),
        (["*.example.org"], "example.org", 443, False),
        (["*.example.org"], "evilexample.org", 443, False),
        (["93.184.77.10"], "93.184.77.10", 443, True),
        (["93.184.77.10"], "0x5db84d0a", 443, True),
        (["93.184.77.10"], "::ffff:93.184.77.10", 443, True),
        (["93.184.77.0/24:5432"], "93.184.77.9", 5432, True),
        (["93.184.77.0/24:5432"], "93.184.78.9", 5432, False),
        (["[2606:4700::1]:8443"], "2606:4700:0::1", 8443, True),
        (["2606:4700::1"], "2606:4700::1", 443, True),
        (["example.org"], "93.184.77.10", 443, False),
        (["example.org"], "example.org\0", 443, False),
        (["example.org"], "", 443, False),
        ("all-public", "anything.example", 25000, True),
        ("all-public", "exa mple", 80, False),
        ("packages", "index.example", 443, True),
        ("packages", "index.example", 80, False),
    ],
)
def test_a_name_and_port_are_judged(asked: object, name: str, port: int, allowed: bool) -> None:
    assert decide(policy(asked), name, port).allowed is allowed


def test_a_name_of_the_operators_is_vouched_for_and_a_callers_is_not() -> None:
    both = policy({"presets": ["db"], "allow": ["db.corp.example:*"]})

    assert decide(both, "db.corp.example", 5432).trusted
    assert decide(both, "db.corp.example", 5432).rule == "db: db.corp.example:5432"
    assert not decide(both, "db.corp.example", 22).trusted, "not on another port"


def test_who_is_vouched_for_may_be_private_but_never_this_host_or_a_metadata_service() -> None:
    rules = Rules((parse_range("127.0.0.2/32"),))
    for address in ("10.0.0.1", "192.168.1.1", "172.16.0.1", "fd12::1", "100.64.0.1", "8.8.8.8"):
        assert rules.permit_trusted(address), address
    for address in """127.0.0.1 0.0.0.0 169.254.169.254 ::1 :: fe80::1 fe80::1%eth0 fd00:ec2::254
        100.100.100.200 168.63.129.16 192.0.0.192 224.0.0.1 ff02::1 ::ffff:127.0.0.1
        64:ff9b::7f00:1 ::ffff:169.254.169.254 255.255.255.255 2002:7f00:1:: nonsense""".split():
        assert not rules.permit_trusted(address), address
    assert rules.permit_trusted("127.0.0.2"), "a range that the operator allows by name"


def test_a_network_survives_being_stored() -> None:
    asked = Network.model_validate({"allow": ["*.example.org:443"], "presets": ["db"]})
    assert Network.model_validate_json(asked.model_dump_json()) == asked


def test_pip_is_understood() -> None:
    default = ("https://index.example/simple", "files.example")
    urls, told = read_pip(*default, {})
    assert urls == ["https://index.example/simple", "https://files.example/"]
    assert told == {}

    urls, told = read_pip(
        *default,
        {
            "global.index-url": "https://ignored.example/",
            ":env:.index-url": "https://user:secret@mirror.example:8443/simple",
            "global.extra-index-url": "https://one.example/ https://two.example/",
            "global.find-links": "/opt/wheels https://links.example/",
        },
    )
    assert [url.rpartition("@")[2] for url in urls] == [
        "mirror.example:8443/simple",
        "https://one.example/",
        "https://two.example/",
        "https://links.example/",
    ]
    assert told["PIP_INDEX_URL"] == "https://mirror.example:8443/simple", "without the password"
    assert told["PIP_FIND_LINKS"] == "https://links.example/", "a folder of the host's is not there"


def test_npm_is_understood() -> None:
    settings = {"registry": "https://npm.example/", "@a:registry": "https://a.example/", "x": 1}
    urls, told = read_npm(settings)
    assert urls == ["https://npm.example/", "https://a.example/"]
    assert told["npm_config_@a:registry"] == "https://a.example/"
    assert without_secrets("https://u:p@h.example:1/x?y") == "https://h.example:1/x?y"
