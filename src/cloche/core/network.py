"""Where a machine may connect to: by name, and nowhere unless it is said.

`network` of a job or sandbox is a word, a list of hosts, or an object. It is settled
against the operator's presets once, and what comes of that decides every connection.
Names alone are judged here; which addresses they may lead to is for `core.addresses`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cloche.core.addresses import Network as Range
from cloche.core.addresses import literal
from cloche.core.errors import BadRequest

MAX_PATTERNS: Final = 200
MAX_PRESETS: Final = 20
MAX_NAME: Final = 253
"""As long as a name in the DNS can be."""
NONE: Final = "none"
ALL_PUBLIC: Final = "all-public"
PACKAGES: Final = "packages"
WORDS: Final = (NONE, ALL_PUBLIC, PACKAGES)
WEB_PORTS: Final = frozenset({80, 443})
"""What a pattern without a port stands for."""
_WIDEST: Final = {4: 8, 6: 19}
"""The shortest prefix of a range that still says something."""

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_PRESET = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
# Second-level labels below which a country's registry sells names to anyone.
_SOLD = frozenset(
    {"ac", "co", "com", "edu", "go", "gob", "gov", "gv", "ltd", "ne", "net", "or", "org"}
)


def plain_name(text: str) -> str:
    """Return a host's name as it is compared: lower case, without the root's dot.

    Raises:
        ValueError: no host goes by such a name.
    """
    if not text.isascii():
        raise ValueError("is not ASCII: write it as `xn--…`")
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("is no host's name")
    # What a resolver takes for a number is an address, or an attempt at one.
    if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):
        raise ValueError("is neither a name nor an address")
    return name


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern: a name, all names below one, an address or a range; and its ports."""

    text: str
    """As it is shown to whoever asks why."""
    name: str = ""
    below: bool = False
    """`name` stands for the names below it."""
    range: Range | None = None
    ports: frozenset[int] | None = WEB_PORTS
    """None: any."""
    preset: str = ""
    """The operator's preset it is from: its names are vouched for."""

    def matches(self, name: str, address: Range | None, port: int) -> bool:
        if self.ports is not None and port not in self.ports:
            return False
        if address is not None:
            return self.range is not None and _within(address, self.range)
        if self.range is not None:
            return False
        return name.endswith(f".{self.name}") if self.below else name == self.name


def _within(address: Range, range_: Range) -> bool:
    if isinstance(address, ipaddress.IPv4Network) and isinstance(range_, ipaddress.IPv4Network):
        return address.subnet_of(range_)
    if isinstance(address, ipaddress.IPv6Network) and isinstance(range_, ipaddress.IPv6Network):
        return address.subnet_of(range_)
    return False


def parse_rule(text: str, preset: str = "") -> Rule:
    """Read a pattern: `HOST`, `*.HOST`, `ADDRESS`, `RANGE`, each with `:PORT` or `:*` or without.

    Raises:
        ValueError: what is wrong with it.
    """
    if any(character in text for character in "@?#\\") or "://" in text:
        raise ValueError("is a URL or holds a user: give a host's name alone")
    host, ports = _split(text)
    shown = f"{preset}: {text}" if preset else text
    if host.startswith("*"):
        return Rule(shown, name=_suffix(host), below=True, ports=ports, preset=preset)
    if "/" in host or literal(host) is not None:
        return Rule(shown, range=_range(host), ports=ports, preset=preset)
    return Rule(shown, name=plain_name(host), ports=ports, preset=preset)


def _split(text: str) -> tuple[str, frozenset[int] | None]:
    """Take a pattern's port off. An IPv6 address with a port stands in brackets."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("has brackets that do not match")
        colon, port = rest[:1], rest[1:]
    elif text.count(":") > 1:
        return text, WEB_PORTS
    else:
        host, colon, port = text.partition(":")
    if not colon:
        return host, WEB_PORTS
    if port == "*":
        return host, None
    if not re.fullmatch(r"[1-9][0-9]{0,4}", port) or int(port) > 65535:
        raise ValueError("has a port that is no number from 1 to 65535, and not `*`")
    return host, frozenset({int(port)})


def _suffix(host: str) -> str:
    if host == "*":
        raise ValueError(f"means every host: if that is meant, say `{ALL_PUBLIC}`")
    if not host.startswith("*."):
        raise ValueError("has a `*` elsewhere than for all names below one: `*.example.org`")
    name = plain_name(host[2:])
    labels = name.split(".")
    if len(labels) == 1 or (len(labels) == 2 and len(labels[1]) == 2 and labels[0] in _SOLD):
        raise ValueError("means all of a registry's names: give a name that someone owns")
    return name


def _range(host: str) -> Range:
    try:
        if "/" in host:
            found = ipaddress.ip_network(host)
        else:
            found = ipaddress.ip_network(literal(host) or host)
    except ValueError as error:
        raise ValueError(f"is no address or range: {error}") from None
    if found.prefixlen < _WIDEST[found.version]:
        raise ValueError(f"is a range so wide that it means everything: say `{ALL_PUBLIC}`")
    return found


def _pattern(text: str) -> str:
    try:
        parse_rule(text)
    except ValueError as error:
        raise ValueError(f"{text[:80]!r} {error}") from None
    return text


def _preset_name(text: str) -> str:
    if not _PRESET.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is no preset's name")
    if text == NONE:
        raise ValueError(f"`{NONE}` stands alone, or is left out")
    return text


Pattern = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_pattern)]
PresetName = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_preset_name)]
Presets = Mapping[str, Iterable[str]]


class Network(BaseModel):
    """What a machine may reach. A word or a list of hosts will do."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)

    allow: Annotated[tuple[Pattern, ...], Field(max_length=MAX_PATTERNS, strict=False)] = ()
    """Hosts by name, `*.` and a name, address or range; each with its port, or for the web's."""
    presets: Annotated[tuple[PresetName, ...], Field(max_length=MAX_PRESETS, strict=False)] = ()
    """`packages`, `all-public`, or a name that the operator gave to a list."""
    max_connections: Annotated[int, Field(ge=1, le=1000)] = 500
    """Open at once; more wait."""
    max_bytes: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """In and out together, in all."""

    @model_validator(mode="before")
    @classmethod
    def _take_short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {} if value == NONE else {"presets": [value]}
        if isinstance(value, list | tuple):
            return {"allow": value}
        return value

    @property
    def closed(self) -> bool:
        return not self.allow and not self.presets


def also_short(schema: dict[str, Any]) -> None:
    """Tell in a field's JSON schema that a word or a list is taken as well."""
    whole = {key: schema.pop(key) for key in ("$ref", "allOf") if key in schema}
    schema["anyOf"] = [
        {"type": "string", "maxLength": 64},
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PATTERNS},
        whole,
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What was asked for, with its presets spelled out. This decides."""

    rules: tuple[Rule, ...] = ()
    all_public: bool = False
    max_connections: int = 500
    max_bytes: int | None = None

    @property
    def closed(self) -> bool:
        return not self.rules and not self.all_public


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a name and port may be connected to, and by which rule."""

    allowed: bool
    rule: str = ""
    trusted: bool = False
    """The operator vouches for the name: it may lead to a private address."""


def decide(policy: Policy, name: str, port: int) -> Verdict:
    """Judge a host, as a program spells it, and a port. Never raises: what is odd is refused."""
    spelled = literal(name)
    address = None if spelled is None else ipaddress.ip_network(_spelled(spelled))
    if address is None:
        try:
            name = plain_name(name)
        except ValueError:
            return Verdict(allowed=False)
    found = [rule for rule in policy.rules if rule.matches(name, address, port)]
    # One that is vouched for allows more than one that is not.
    for rule in sorted(found, key=lambda rule: not rule.preset):
        return Verdict(allowed=True, rule=rule.text, trusted=bool(rule.preset))
    if policy.all_public:
        return Verdict(allowed=True, rule=ALL_PUBLIC)
    return Verdict(allowed=False)


def _spelled(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Spell an address without its scope, and a mapped one as what it stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.IPv6Address(int(address)))
    return str(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One connection that a program in a machine made, or tried to make."""

    at: datetime
    name: str
    port: int
    via: Literal["http", "connect", "socks5"]
    verdict: Literal["allowed", "refused", "failed", "cut"]
    """`cut`: it was allowed, and ended by us."""
    rule: str = ""
    reason: str = ""
    address: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    duration_s: float = 0.0


def check_presets(network: Network, known: Iterable[str]) -> None:
    """Refuse a preset that is not known here, by name alone.

    Raises:
        BadRequest: which one, and which there are.
    """
    words = {*WORDS, *known}
    for name in network.presets:
        if name not in words:
            raise BadRequest(
                f"network: there is no preset {name!r}.",
                remedy=f"Use one of {', '.join(sorted(words))}, or a list of hosts.",
            )


def settle(network: Network, presets: Presets) -> Policy:
    """Spell the presets out.

    Raises:
        BadRequest: there is no such preset.
    """
    check_presets(network, presets)
    rules = [parse_rule(text) for text in network.allow]
    for name in network.presets:
        rules += [parse_rule(text, name) for text in presets.get(name, ())]
    return Policy(
        rules=tuple(rules),
        all_public=ALL_PUBLIC in network.presets,
        max_connections=network.max_connections,
        max_bytes=network.max_bytes,
    )
