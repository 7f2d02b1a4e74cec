"""Lets callers in: by key or session, even on loopback, and only from where they may come.

An agent server that any web page can reach is a way into the host, so a request
that a browser sent from another site is refused whatever it carries. A browser
sends its cookie by itself, so what changes something must come from our own page.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from cloche.api.services import Services, Use
from cloche.core import about
from cloche.core.access import ENVIRONMENT, Caller, Role
from cloche.core.errors import NotAllowed, NotAuthenticated, StoreUnavailable
from cloche.core.quota import Quota

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
COOKIE = "cloche_session"
_NOBODY = Caller(key_id="none", tenant="default", role=Role.ADMIN)


async def identify(request: Request, services: Use) -> Caller:
    """Return whose request this is.

    Raises:
        NotAuthenticated: it carries neither key nor session, or a wrong one.
        NotAllowed: it was sent to a name we do not go by, or from another site.
        RateLimited: its key makes too many requests, or its address too many guesses.
    """
    check_names(request, services)
    if not services.authenticate:
        return _NOBODY
    secret = _secret(request)
    if secret is not None:
        return await _let_in(request, services, secret, _by_key)
    cookie = request.cookies.get(COOKIE)
    if cookie is not None:
        check_same_origin(request)
        return await _let_in(request, services, cookie, _by_session)
    raise NotAuthenticated(
        "The request carries no API key.",
        remedy="Send it as `Authorization: Bearer KEY`; `cloche keys create` makes one.",
    )


async def _let_in(
    request: Request,
    services: Services,
    credential: str,
    identified: Callable[[str, Services], Awaitable[Caller | None]],
) -> Caller:
    counted = services.gate.enter(address(request), credential)
    caller = await identified(credential, services)
    if caller is None:
        services.gate.wrong(address(request), credential)
        raise NotAuthenticated(
            "The API key opens nothing here, or the session has ended.",
            remedy="Check the key for typing errors; `cloche keys list` tells which are in force. "
            "For a browser, get a new link with `cloche open`.",
        )
    if not counted:
        services.gate.right(credential, caller.key_id, await _quota(caller, services))
    return caller


async def _quota(caller: Caller, services: Services) -> Quota:
    """Return what the caller may use.

    The operator's own key is let in while the store is away, too: that is when it is needed.
    """
    try:
        return await services.quotas.of(caller.tenant)
    except StoreUnavailable:
        if caller.key_id.startswith(ENVIRONMENT):
            return Quota()
        raise


async def _by_key(secret: str, services: Services) -> Caller | None:
    if services.api_key and hmac.compare_digest(secret.encode(), services.api_key.encode()):
        return environment(services.api_key)
    return await services.access.identify(secret)


async def _by_session(secret: str, services: Services) -> Caller | None:
    session = await services.sessions.identify(secret)
    if session is None or not _key_is_ours(session.key_id, services):
        return None
    return Caller(
        key_id=session.key_id,
        tenant=session.tenant,
        role=session.role,
        session_until=session.expires_at,
    )


def environment(api_key: str) -> Caller:
    """Return who comes with the key of the environment: by its hash, so that a new key is another
    caller, and the sessions of the old one end."""
    mark = hashlib.sha256(api_key.encode()).hexdigest()[:12]
    return Caller(key_id=f"{ENVIRONMENT}{mark}", tenant="default", role=Role.ADMIN)


def _key_is_ours(key_id: str, services: Services) -> bool:
    if not key_id.startswith(ENVIRONMENT):
        return True
    return services.api_key is not None and environment(services.api_key).key_id == key_id


def check_same_origin(request: Request) -> None:
    """Refuse what changes something unless a page of our own sent it.

    `SameSite` alone does not do: to it, every port of a host is one site.

    Raises:
        NotAllowed: it came from elsewhere, or does not say from where.
    """
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return
    origin = request.headers.get("origin")
    ours = origin == own_origin(request)
    if origin is None:  # Left out by a few browsers, and by whatever is none.
        ours = request.headers.get("sec-fetch-site") == "same-origin"
    if not ours:
        raise NotAllowed(
            "The request carries a session, but was not sent by a page of this server.",
            remedy="Use the page, or send an API key. Behind a proxy that ends TLS, see that it "
            "sends X-Forwarded-Proto.",
        )


def own_origin(request: Request) -> str:
    return f"{request.url.scheme}://{request.headers.get('host', '')}"


def address(request: Request) -> str:
    return request.client.host if request.client else ""


def check_names(request: Request, services: Services) -> None:
    """Refuse what another site made a browser send (DNS rebinding, cross-site requests)."""
    host = _name(f"//{request.headers.get('host', '')}")
    known = LOOPBACK | services.hosts
    if host not in known:
        raise NotAllowed(
            f"This server does not go by the name {host[:100]!r}.",
            remedy="Use the address it was started with, or add the name to CLOCHE_HOSTS.",
        )
    origin = request.headers.get("origin")
    if origin is not None and _name(origin) not in known:
        raise NotAllowed(
            "The request was sent by a page of another site.",
            remedy="Call the API from a program, or from a page that this server served.",
        )


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _secret(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key")


def require(minimum: Role) -> object:
    async def check(caller: Annotated[Caller, Depends(identify)]) -> Caller:
        about.note(tenant=caller.tenant)
        if not caller.role.at_least(minimum):
            raise NotAllowed(
                f"A {caller.role} key does not open this; it takes {minimum}.",
                remedy="Ask an admin for a key with that role.",
            )
        return caller

    return Depends(check)


Reader = Annotated[Caller, require(Role.READ_ONLY)]
Member = Annotated[Caller, require(Role.MEMBER)]
Admin = Annotated[Caller, require(Role.ADMIN)]


def scope(caller: Caller) -> str | None:
    """Return whose jobs a caller sees: an admin's are everyone's."""
    return None if caller.role is Role.ADMIN else caller.tenant
