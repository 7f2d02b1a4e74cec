"""Lets callers in: by key, even on loopback, and only from where they may come.

An agent server that any web page can reach is a way into the host, so a request
that a browser sent from another site is refused whatever it carries.
"""

from __future__ import annotations

import hmac
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from cloche.api.services import Services, Use
from cloche.core import about
from cloche.core.access import Caller, Role
from cloche.core.errors import NotAllowed, NotAuthenticated

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ENVIRONMENT = Caller(key_id="environment", tenant="default", role=Role.ADMIN)
_NOBODY = Caller(key_id="none", tenant="default", role=Role.ADMIN)


async def identify(request: Request, services: Use) -> Caller:
    """Return whose request this is.

    Raises:
        NotAuthenticated: it carries no key, or a wrong one.
        NotAllowed: it was sent to a name we do not go by, or from another site.
    """
    _check_names(request, services)
    if not services.authenticate:
        return _NOBODY
    secret = _secret(request)
    if secret is None:
        raise NotAuthenticated(
            "The request carries no API key.",
            remedy="Send it as `Authorization: Bearer KEY`; `cloche keys create` makes one.",
        )
    if services.api_key and hmac.compare_digest(secret.encode(), services.api_key.encode()):
        return _ENVIRONMENT
    caller = await services.access.identify(secret)
    if caller is None:
        raise NotAuthenticated(
            "The API key opens nothing here.",
            remedy="Check it for typing errors; `cloche keys list` tells which are in force.",
        )
    return caller


def _check_names(request: Request, services: Services) -> None:
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
