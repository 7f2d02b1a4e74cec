"""What programs in a machine with a network are told: the proxy, the certificates, the registries.

By variables of each command alone, and one file of certificates: nothing else in the
machine changes, and what a caller sets itself goes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cloche.core.errors import BadSettings
from cloche.sandbox.sandbox import Sandbox

CA_FILE: Final = "/home/user/.cloche/ca.crt"
HOST_BUNDLE: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_CA_BYTES: Final = 8 << 20
_CA_VARIABLES: Final = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS",
    "npm_config_cafile", "GIT_SSL_CAINFO", "DENO_CERT", "CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE",
)  # fmt: skip
_HERE: Final = "localhost,127.0.0.1,::1"


def environment(port: int, registries: Mapping[str, str], *, certificates: bool) -> dict[str, str]:
    """Return the variables of every command in a machine whose proxy is at `port`."""
    # The HTTP side for ALL_PROXY, too: the port speaks SOCKS5 as well, but several clients
    # fail as a whole when that variable names a kind of proxy that they lack a library for.
    proxy = f"http://127.0.0.1:{port}"
    given = dict(registries)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        given[name] = given[name.upper()] = proxy
    given["no_proxy"] = given["NO_PROXY"] = _HERE
    given["npm_config_proxy"] = given["npm_config_https_proxy"] = proxy
    given["npm_config_noproxy"] = _HERE
    given["NODE_USE_ENV_PROXY"] = "1"
    if certificates:
        given |= dict.fromkeys(_CA_VARIABLES, CA_FILE)
    return given


async def read_bundle(chosen: Path | None) -> bytes:
    """Return the certificates that machines are to trust: the operator's choice, or the host's.

    Raises:
        BadSettings: the operator's choice is no such file.
    """
    path = chosen or HOST_BUNDLE
    try:
        found = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        if chosen is None:
            return b""
        raise _unfit(path, error.strerror or "it cannot be read") from None
    if b"-----BEGIN CERTIFICATE-----" not in found or len(found) > _CA_BYTES:
        if chosen is None:
            return b""
        raise _unfit(path, "it holds no certificates in PEM form, or too many")
    return found


async def place(sandbox: Sandbox, bundle: bytes) -> None:
    """Put the certificates into a machine, unless some were put there before."""
    if bundle and not await sandbox.files.exists(CA_FILE):
        await sandbox.files.write(CA_FILE, bundle)


def _unfit(path: Path, why: str) -> BadSettings:
    return BadSettings(
        f"CLOCHE_CA_BUNDLE: {path}: {why}.",
        remedy="Name a file of certificates in PEM form, or unset it for the host's own.",
    )
