"""Tells an image build how this host reaches its package sources.

A host behind a company proxy or mirror is already set up for apt, pip and npm.
Those settings are the ones that work, so a build borrows them, as far as they
say where packages come from, and writes down no host name of its own.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloche.core.errors import OperatorError

WHEELS = "/run/build/wheels"
"""Where image/build.sh shows the host's folders of wheels to pip."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_CODENAMES = "bullseye|bookworm|trixie|forky|duke|sid"
_SUITE = re.compile(rf"(?:{_CODENAMES})(-updates|-security)?")
_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<rest>.+)")
_REMOTE = re.compile(r"(https?|ftp|mirror(\+\w+)?):")
_APT_SETTING = re.compile(
    r"Acquire::(?:\S*Proxy\S*|Retries|Check-Valid-Until|https\S*::(?:CaInfo|CaPath|Verify-\w+)) \"",
    re.IGNORECASE,
)
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "ftp_proxy")
_PIP = ("index_url", "extra_index_url", "no_index", "trusted_host", "proxy", "retries", "timeout")
_NPM = ("registry", "strict_ssl", "proxy", "https_proxy", "noproxy")
_NPMRC_LINE = re.compile(
    r"\s*(registry|@[^:=]+:registry|//[^=]+|strict-ssl|proxy|https-proxy|noproxy)\s*="
)
_CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


@dataclass(frozen=True, slots=True, kw_only=True)
class AptEntry:
    """One URI with its suites, from either of apt's two formats."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""
    trusted: bool = False

    def line(self, suite: str) -> str:
        """Return the one-line form of this entry, for `suite` and Debian's main component."""
        options = [f"signed-by={self.signed_by}"] if self.signed_by.startswith("/") else []
        options += ["trusted=yes"] if self.trusted else []
        bracket = f"[{' '.join(options)}] " if options else ""
        return f"deb {bracket}{self.uri} {suite} main"


def apt_entries(folder: Path) -> Iterator[AptEntry]:
    """Yield the enabled binary entries under `folder`, which is /etc/apt on a real host."""
    lists = [folder / "sources.list", *sorted(folder.glob("sources.list.d/*.list"))]
    for path in lists:
        if path.is_file():
            yield from _one_line_entries(path.read_text("utf-8", "replace"))
    for path in sorted(folder.glob("sources.list.d/*.sources")):
        yield from _deb822_entries(path.read_text("utf-8", "replace"))


def _one_line_entries(text: str) -> Iterator[AptEntry]:
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.partition("#")[0].strip())
        if match is None:
            continue
        options = dict(option.partition("=")[::2] for option in (match["options"] or "").split())
        suite, *components = match["rest"].split()
        yield AptEntry(
            uri=match["uri"],
            suites=(suite,),
            components=tuple(components),
            signed_by=options.get("signed-by", ""),
            trusted=options.get("trusted") == "yes",
        )


def _deb822_entries(text: str) -> Iterator[AptEntry]:
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        unfolded = re.sub(r"\n\s+", " ", stanza)
        pairs = (line.partition(":")[::2] for line in unfolded.splitlines())
        fields = {name.strip().lower(): value.strip() for name, value in pairs}
        if "deb" not in fields.get("types", "").split() or fields.get("enabled") == "no":
            continue
        for uri in fields.get("uris", "").split():
            yield AptEntry(
                uri=uri,
                suites=tuple(fields.get("suites", "").split()),
                components=tuple(fields.get("components", "").split()),
                signed_by=fields.get("signed-by", ""),
                trusted=fields.get("trusted") == "yes",
            )


def debian_sources(entries: Iterable[AptEntry], suite: str) -> str | None:
    """Return sources for `suite` from the mirrors in `entries`, or None if none is Debian's.

    Other publishers use Debian's code names too. What tells the archive from
    them is its key, its folder's name, or that it has an `-updates` suite.
    """
    archive: AptEntry | None = None
    security: AptEntry | None = None
    candidates = [
        entry for entry in entries if _REMOTE.match(entry.uri) and "main" in entry.components
    ]
    with_updates = {
        entry.uri
        for entry in candidates
        if any(match and match[1] == "-updates" for match in map(_SUITE.fullmatch, entry.suites))
    }
    for entry in candidates:
        kinds = {match[1] for match in map(_SUITE.fullmatch, entry.suites) if match}
        if "-security" in kinds:
            security = security or entry
        elif kinds and (
            entry.uri in with_updates
            or "debian-archive" in entry.signed_by
            or entry.uri.rstrip("/").endswith("/debian")
        ):
            archive = archive or entry
    if archive is None:
        return None
    lines = [archive.line(suite)]
    if suite != "sid":
        lines.append(archive.line(f"{suite}-updates"))
        if security is not None:
            lines.append(security.line(f"{suite}-security"))
    return "\n".join(lines) + "\n"


def apt_options(dump: str) -> str:
    """Return the lines of `apt-config dump` that say how to reach a mirror."""
    return "".join(f"{line}\n" for line in dump.splitlines() if _APT_SETTING.match(line))


def pip_files(environ: Mapping[str, str], home: Path) -> list[Path]:
    """Return pip's configuration files, the strongest last."""
    config_home = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf"]
    files.append(config_home / "pip/pip.conf")
    if named := environ.get("PIP_CONFIG_FILE"):
        files.append(Path(named))
    return [path for path in files if path.is_file()]


def pip_settings(environ: Mapping[str, str], files: Iterable[Path]) -> dict[str, str]:
    """Return pip's settings by name, as environment variables and `files` give them."""
    settings: dict[str, str] = {}
    for path in files:
        parser = configparser.RawConfigParser(strict=False)
        with contextlib.suppress(configparser.Error):
            parser.read_string(path.read_text("utf-8", "replace"))
        for section in ("global", "install"):
            if parser.has_section(section):
                settings |= {key.replace("-", "_"): value for key, value in parser.items(section)}
    settings |= {
        key.removeprefix("PIP_").lower(): value
        for key, value in environ.items()
        if key.startswith("PIP_")
    }
    if "default_timeout" in settings:
        settings.setdefault("timeout", settings["default_timeout"])
    return settings


def wheel_folders(settings: Mapping[str, str]) -> tuple[list[Path], list[str]]:
    """Split pip's find-links into folders on this host and addresses; drop the rest."""
    folders: list[Path] = []
    links: list[str] = []
    for link in settings.get("find_links", "").split():
        path = Path(link.removeprefix("file://"))
        if path.is_absolute() and path.is_dir():
            folders.append(path)
        elif "://" in link and not link.startswith("file:"):
            links.append(link)
    return folders, links


def npmrc(texts: Iterable[str], environ: Mapping[str, str]) -> str:
    """Return the lines of npm's configuration files that say where packages come from.

    npm fills in `${NAME}` from an environment that the build does not have.
    """
    lines = [line for text in texts for line in text.splitlines() if _NPMRC_LINE.match(line)]
    filled = (re.sub(r"\$\{(\w+)\}", lambda m: environ.get(m[1], ""), line) for line in lines)
    return "".join(f"{line}\n" for line in filled)


def ca_bundle(environ: Mapping[str, str]) -> Path | None:
    """Return the certificates this host trusts, if it says where they are."""
    named = (environ.get("SSL_CERT_FILE"), environ.get("PIP_CERT"), *_CA_BUNDLES)
    return next((Path(name) for name in named if name and Path(name).is_file()), None)


def environment(environ: Mapping[str, str], pip: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a build: nothing of this host but its package sources."""
    folders, links = wheel_folders(pip)
    links += [f"{WHEELS}/{number}" for number in range(len(folders))]
    result = {
        "PATH": PATH,
        "HOME": "/root",
        "LANG": "C.UTF-8",
    }
    result |= {key: environ[key] for key in environ if key.lower() in _PROXIES}
    result |= {f"PIP_{key.upper()}": pip[key] for key in _PIP if key in pip}
    if links:
        result["PIP_FIND_LINKS"] = " ".join(links)
    for key, value in environ.items():
        name = key.lower().removeprefix("npm_config_")
        if key.lower().startswith("npm_config_") and name in _NPM:
            result[f"npm_config_{name}"] = value
    return result


def describe(folder: Path, *, suite: str, dump: str, apt_sources: Path | None) -> dict[str, str]:
    """Write what image/build.sh wants to know of this host to `folder`; return its environment.

    Raises:
        OperatorError: `apt_sources` cannot be read.
    """
    environ = dict(os.environ)
    home = Path(environ.get("HOME", "/root"))
    # The host's registries may hold passwords.
    folder.mkdir(mode=0o700)
    (folder / "apt.conf").write_text(apt_options(dump), "utf-8")
    sources = _read_sources(apt_sources, suite)
    if sources is not None:
        (folder / "sources.list").write_text(sources, "utf-8")
    if (bundle := ca_bundle(environ)) is not None:
        (folder / "ca.crt").write_bytes(bundle.read_bytes())
    user_npmrc = environ.get("NPM_CONFIG_USERCONFIG") or environ.get("npm_config_userconfig")
    npm_files = [Path("/etc/npmrc"), Path("/usr/etc/npmrc"), Path(user_npmrc or home / ".npmrc")]
    texts = [path.read_text("utf-8", "replace") for path in npm_files if path.is_file()]
    (folder / "npmrc").write_text(npmrc(texts, environ), "utf-8")
    pip = pip_settings(environ, pip_files(environ, home))
    (folder / "wheels").mkdir()
    for number, wheels in enumerate(wheel_folders(pip)[0]):
        (folder / "wheels" / str(number)).symlink_to(wheels)
    return environment(environ, pip)


def _read_sources(named: Path | None, suite: str) -> str | None:
    if named is None:
        return debian_sources(apt_entries(Path("/etc/apt")), suite)
    try:
        return named.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"The apt sources file {named} cannot be read: {error}.",
            remedy="Correct CLOCHE_APT_SOURCES or --apt-sources, or leave it out.",
        ) from error
