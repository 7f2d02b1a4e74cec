"""Calls an address that a caller named, and no other than the one that was checked.

The name is resolved here, once; every address it leads to is checked; and the call is
made to that very address. Whoever owns the name cannot point it elsewhere in between
(DNS rebinding), nor by a redirect: none is followed. TLS is verified against the name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
from pydantic_core import Url

from cloche.core.addresses import Rules, literal
from cloche.core.webhook import parse_url
from cloche.sandbox.lookup import Resolve, Resolver

TIMEOUT_S: Final = 10.0
_TRIED: Final = 3
"""Addresses of one name that are tried, at most."""
_PORTS: Final = {"http": 80, "https": 443}


class NotAnswered(Exception):
    """Nobody took the call. The message is for whoever gave the address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a receiver said. Its body is not read."""

    status: int
    retry_after: str = ""


class Outbound:
    """Makes calls to addresses that the rules permit."""

    def __init__(self, rules: Rules, *, resolve: Resolve | None = None) -> None:
        self._rules = rules
        self._resolve = resolve or Resolver()
        # Trusts what certifi lists, or the file that SSL_CERT_FILE names.
        self._tls = httpx.create_ssl_context()

    async def post(self, address: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send `body`, and return the first answer that comes within `TIMEOUT_S`.

        Raises:
            NotAnswered: there was none, or the address is not to be called.
        """
        url = parse_url(address)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._try_each(url, await self._addresses(url), body, headers)
        except TimeoutError:
            raise NotAnswered(f"no answer within {TIMEOUT_S:g} s") from None

    async def _addresses(self, url: Url) -> Sequence[str]:
        host, port = url.host or "", url.port or 0
        spelled = literal(host)
        if spelled is not None:
            found: Sequence[str] = [str(spelled)]
        else:
            try:
                found = await self._resolve(host, port)
            except (OSError, UnicodeError):
                found = ()
            if not found:
                raise NotAnswered("the host's name is not known")
        # All of them: which one is dialled is chance, and must not matter. They are not told:
        # names inside the operator's network are nobody else's business.
        if not all(self._rules.permit(each) for each in found):
            raise NotAnswered("the host's address is not one that may be called")
        return found

    async def _try_each(
        self, url: Url, addresses: Sequence[str], body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        chosen = addresses[:_TRIED]
        # One that swallows what is sent to it leaves time for the next.
        patience = httpx.Timeout(TIMEOUT_S, connect=TIMEOUT_S / len(chosen))
        error: httpx.HTTPError | None = None
        for address in chosen:
            try:
                return await self._send(_request(url, address, body, headers), patience)
            except (httpx.ConnectError, httpx.ConnectTimeout) as refused:
                error = refused
            except httpx.HTTPError as broken:
                error = broken
                break  # It may have been heard: the next try is another day's.
        raise NotAnswered(_told(error)) from error

    async def _send(self, request: httpx.Request, patience: httpx.Timeout) -> Answer:
        # A client for each call: a connection that was verified for one name is not to be
        # used for another on the same address. And no proxy out of the environment.
        async with httpx.AsyncClient(verify=self._tls, trust_env=False) as client:
            request.extensions["timeout"] = patience.as_dict()
            answer = await client.send(request, stream=True, follow_redirects=False)
            try:
                retry_after = answer.headers.get("retry-after", "")
                return Answer(status=answer.status_code, retry_after=retry_after)
            finally:
                await answer.aclose()


def _request(url: Url, address: str, body: bytes, headers: Mapping[str, str]) -> httpx.Request:
    """Address the call to `address`, and the letter in it to the name."""
    host = url.host or ""
    port = "" if url.port == _PORTS[url.scheme] else f":{url.port}"
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    dialled = f"[{address}]" if ":" in address else address
    return httpx.Request(
        "POST",
        httpx.URL(f"{url.scheme}://{dialled}:{url.port}").copy_with(raw_path=path.encode()),
        content=body,
        headers={"host": host + port, **headers},
        extensions={"sni_hostname": host.strip("[]")},
    )


def _told(error: httpx.HTTPError | None) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, httpx.ConnectError):
        return f"no connection: {error}"
    return f"the connection broke: {error}"
