"""Where this host's own package managers get their packages from.

No registry's name is written in Cloche: each tool is asked what it is set up to use, and
what it falls back to. The answer is the preset `packages`, and what the same tools inside
a machine are told, so that an install there works as it does here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from cloche.core.network import parse_rule

logger = logging.getLogger(__name__)

_ASK_S: Final = 30
_ASK_PIP: Final = """
import json
from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI
settings = Configuration(isolated=False)
settings.load()
print(json.dumps([PyPI.simple_url, PyPI.file_storage_domain, dict(settings.items())]))
"""
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Registries:
    """What the host's tools use."""

    patterns: tuple[str, ...] = ()
    """Their hosts, with the ports they are reached at."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What tools in a machine are told, where the host's are not set up as usual."""


class Source:
    """Asks the tools once, when it is first needed: each takes a moment to start."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[Registries] | None = None

    async def __call__(self) -> Registries:
        if self._asked is None:
            self._asked = asyncio.ensure_future(asyncio.to_thread(ask))
        return await asyncio.shield(self._asked)


def ask() -> Registries:
    """Ask pip, npm and apt. One that is not here has nothing to say."""
    pip_urls, pip_env = _pip()
    npm_urls, npm_env = _npm()
    urls = [*pip_urls, *npm_urls, *_apt(), *_uv(os.environ)]
    patterns = dict.fromkeys(pattern for url in urls for pattern in _patterns(url))
    return Registries(patterns=tuple(patterns), env={**pip_env, **npm_env})


def _pip() -> tuple[list[str], dict[str, str]]:
    for python in (sys.executable, "python3", "/usr/bin/python3"):
        if answer := _json([python, "-c", _ASK_PIP]):
            return read_pip(*answer)
    return [], {}


def read_pip(
    default: str, files: str, settings: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the URLs that pip may ask, and what a pip elsewhere has to be told."""

    def value(name: str) -> str:
        for section in (":env:", "install", "global"):  # Pip's own order.
            if found := settings.get(f"{section}.{name}"):
                return found
        return ""

    index, extra = value("index-url"), value("extra-index-url").split()
    links = [link for link in value("find-links").split() if "://" in link]
    urls = [index or default, *extra, *links]
    if urls[0] == default:
        urls.append(f"https://{files}/")
    told = {
        "PIP_INDEX_URL": without_secrets(index),
        "PIP_EXTRA_INDEX_URL": " ".join(without_secrets(url) for url in extra),
        "PIP_FIND_LINKS": " ".join(without_secrets(url) for url in links),
        "PIP_DEFAULT_TIMEOUT": value("default-timeout") or value("timeout"),
    }
    return urls, {name: text for name, text in told.items() if text}


def _npm() -> tuple[list[str], dict[str, str]]:
    return read_npm(_json(["npm", "config", "list", "--json"]) or {})


def read_npm(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return the URLs that npm may ask, and what an npm elsewhere has to be told."""
    found = {
        name: value
        for name, value in settings.items()
        if isinstance(value, str) and (name == "registry" or name.endswith(":registry"))
    }
    told = {f"npm_config_{name}": without_secrets(url) for name, url in found.items()}
    return list(found.values()), told


def _apt() -> list[str]:
    # apt reads its own lists, in either of their formats.
    return _said(["apt-get", "indextargets", "--format", "$(SITE)"]).split()


def _uv(env: Mapping[str, str]) -> list[str]:
    names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
    # A named index is `name=URL`.
    return [part.rpartition("=")[2] for name in names for part in env.get(name, "").split()]


def _json(argv: list[str]) -> Any:
    """Return what a tool prints as JSON; None if it is not here or says something else."""
    try:
        return json.loads(_said(argv) or "null")
    except ValueError:
        logger.info("packages: %s does not say what it uses", argv[0])
        return None


def _said(argv: list[str]) -> str:
    """Return what a tool prints; nothing if it is not here or fails."""
    program = shutil.which(argv[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=_ASK_S,
            cwd="/",  # Not what a project at hand is set up to use.
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("packages: %s says nothing: %s", argv[0], type(error).__name__)
        return ""
    return done.stdout


def _patterns(url: str) -> Iterable[str]:
    """Return the host and port of a URL, as a pattern; nothing for what is no web address."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return
    if not parts.hostname or port is None or parts.scheme not in _PORTS:
        return
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    pattern = f"{host}:{port}"
    try:
        parse_rule(pattern)
    except ValueError as error:
        logger.warning("packages: left out a host that %s", error)
    else:
        yield pattern


def without_secrets(url: str) -> str:
    """Return a URL without its user and password: a machine is not to have the host's."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
