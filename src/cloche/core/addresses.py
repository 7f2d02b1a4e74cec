"""Which addresses the host may be made to call, whoever asks.

A URL that a caller gives us is a way into the operator's network: to a database
on a private address, to a cloud's metadata service, to the host itself. So a call
goes to a public address, or to one that the operator allows by name of its range.

The ranges are written out, from IANA's special-purpose registries (RFC 6890 and
what followed it): what `ipaddress` calls private changes between versions of Python.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_CLOSED_V4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",        # this host: Linux connects 0.0.0.0 to loopback
        "10.0.0.0/8",       # private
        "100.64.0.0/10",    # carrier's NAT; one cloud's metadata service
        "127.0.0.0/8",      # loopback
        "168.63.129.16/32", # a cloud's metadata service, on a public address
        "169.254.0.0/16",   # link-local: most clouds' metadata services
        "172.16.0.0/12",    # private
        "192.0.0.0/24",     # IETF protocols; one cloud's metadata service
        "192.0.2.0/24",     # documentation
        "192.88.99.0/24",   # 6to4 relays
        "192.168.0.0/16",   # private
        "198.18.0.0/15",    # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",   # documentation
        "224.0.0.0/4",      # multicast
        "240.0.0.0/4",      # reserved, and broadcast
    )
)  # fmt: skip
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_CLOSED_V6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",      # IETF protocols: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",      # 6to4: leads to whatever IPv4 address is inside
        "3fff::/20",      # documentation
    )
)  # fmt: skip
# Forms of an IPv4 address: judged as what they stand for.
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# What no name leads to, whoever vouches for it: this host, its neighbours on the link, the
# services that hand out a cloud's credentials, and what is no single machine's address.
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "224.0.0.0/4",
        "240.0.0.0/4", "168.63.129.16/32", "100.100.100.200/32",
        "::/32", "64:ff9b:1::/48", "fe80::/10", "fec0::/10", "ff00::/8",
        "fd00:ec2::254/128", "fd20:ce::254/128", "2001::/32", "2002::/16",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be called: public addresses, and the ranges that the operator allows."""

    allowed: tuple[Network, ...] = ()

    def permit(self, address: Address | str) -> bool:
        """Tell whether `address` may be called; a text that is no address may not."""
        try:
            plain = _plain(ipaddress.ip_address(address))
        except ValueError:
            return False
        return is_public(plain) or self.names(plain)

    def names(self, address: Address | str) -> bool:
        """Tell whether the operator allows `address` by name of its range."""
        try:
            plain = _plain(ipaddress.ip_address(address))
        except ValueError:
            return False
        return any(plain in network for network in self.allowed)

    def permit_trusted(self, address: Address | str) -> bool:
        """Tell whether a name that the operator vouches for may lead to `address`.

        It may to a private one; but not to this host, or to a metadata service.
        """
        try:
            plain = _plain(ipaddress.ip_address(address))
        except ValueError:
            return False
        if isinstance(plain, ipaddress.IPv6Address) and plain.scope_id is not None:
            return False
        return self.names(plain) or not any(plain in network for network in _NEVER)


def is_public(address: Address) -> bool:
    """Tell whether an address is anyone's to call, on the whole internet."""
    plain = _plain(address)
    if isinstance(plain, ipaddress.IPv4Address):
        return not any(plain in network for network in _CLOSED_V4)
    # A scope names an interface of this host.
    if plain.scope_id is not None or plain not in _GLOBAL_V6:
        return False
    return not any(plain in network for network in _CLOSED_V6)


def literal(host: str) -> Address | None:
    """Return the address that `host` spells, in any way a resolver takes; None for a name.

    `127.1`, `2130706433`, `0x7f000001` and `0177.0.0.1` all spell loopback.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return ipaddress.ip_address(bare)
    except ValueError:
        pass
    if not bare.isascii() or any(character.isspace() for character in bare):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(bare.removesuffix(".")))
    except (OSError, ValueError):
        return None


def parse_range(text: object) -> Network:
    """Read a CIDR range, such as `10.1.0.0/16`.

    Raises:
        ValueError: it is none, or has bits set beyond its length.
    """
    # As text: a number would be taken for an address of its own.
    return ipaddress.ip_network(str(text))


def _plain(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv6Address) and (address in _MAPPED or address in _NAT64):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
