"""Lets browsers in: a link that works once becomes a session's cookie.

Mail scanners and chat previews open links. So opening one only shows a button;
it is the button that uses the link up. The cookie is `SameSite=Strict`, which
works for the same reason: it is our own page that sends the browser on.
"""

from __future__ import annotations

from html import escape
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, ConfigDict

from cloche.api import auth
from cloche.api.answers.access import LoginLink, WhoAmI
from cloche.api.auth import Reader
from cloche.api.described import OPEN, answer, content, example
from cloche.api.page import document
from cloche.api.services import Use
from cloche.core.access import Caller, Role
from cloche.core.errors import BadRequest, NotAllowed
from cloche.core.session import SESSION_AT_MOST

router = APIRouter(tags=["login"])

_FORM_BYTES = 4096
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-www-form-urlencoded": {
                "schema": {
                    "type": "object",
                    "properties": {"token": {"type": "string"}},
                    "required": ["token"],
                },
                "example": {"token": "EXAMPLE"},
            }
        },
    }
}


class NewLink(BaseModel):
    """Whom a link lets in."""

    model_config = ConfigDict(extra="forbid", **example({"role": "read-only"}))

    role: Role | None = None
    """The key's own if left out; never a higher one."""


@router.post(
    "/v1/login-links",
    operation_id="createLoginLink",
    status_code=201,
    responses=answer(LoginLink, 201),
)
async def create_link(
    request: Request, caller: Reader, services: Use, wanted: NewLink | None = None
) -> dict[str, Any]:
    """Make a link that lets one browser in, once, within ten minutes."""
    if not services.authenticate:
        raise BadRequest(
            "Authentication is off, so nobody needs a link.",
            remedy=f"Open {auth.own_origin(request)}/ in a browser.",
        )
    if caller.session_until is not None:
        raise NotAllowed(
            "A session does not make links: it would outlive itself.",
            remedy="Send an API key, as `cloche open` does.",
        )
    role = wanted.role if wanted and wanted.role else caller.role
    if not caller.role.at_least(role):
        raise NotAllowed(
            f"A {caller.role} key makes no link for {role}.",
            remedy="Ask for its own role, or less.",
        )
    link = await services.sessions.link(key_id=caller.key_id, tenant=caller.tenant, role=role)
    await services.access.audit(caller, "login.link", caller.key_id, role=role)
    path = f"/login?token={link.token}"
    return {
        "url": auth.own_origin(request) + path,
        "path": path,
        "role": link.role,
        "expires_at": link.expires_at.isoformat(),
    }


@router.get(
    "/login",
    operation_id="showLogin",
    response_class=HTMLResponse,
    responses=content("text/html", "<!doctype html>...", schema={"type": "string"}),
    openapi_extra=OPEN,
)
async def show_button(
    request: Request,
    services: Use,
    token: Annotated[str, Query(max_length=200, examples=["EXAMPLE"])] = "",
) -> HTMLResponse:
    """Show the button that uses the link up."""
    auth.check_names(request, services)
    return document(
        "Welcome to Cloche",
        "<p>Press the button, and this browser is let in. The link then is used up.</p>"
        '<form method="post" action="/login">'
        f'<input type="hidden" name="token" value="{escape(token)}">'
        "<button autofocus>Let me in</button></form>",
    )


@router.post(
    "/login",
    operation_id="logIn",
    response_class=RedirectResponse,
    status_code=303,
    response_description="The browser is let in, and goes to the page.",
    openapi_extra=_FORM | OPEN,
)
async def log_in(request: Request, services: Use) -> Response:
    """Use a link up, set the session's cookie, and go to the page."""
    auth.check_names(request, services)
    auth.check_same_origin(request)
    form = parse_qs((await request.body())[:_FORM_BYTES].decode(errors="replace"))
    token = form.get("token", [""])[0]
    services.gate.enter(auth.address(request), token)
    opened = await services.sessions.open(token)
    if opened is None:
        services.gate.wrong(auth.address(request), token)
        return document(
            "This link no longer works",
            "<p>A link works once, within ten minutes. Run <code>cloche open</code> for "
            "another.</p>",
            403,
        )
    secret, session = opened
    caller = Caller(key_id=session.key_id, tenant=session.tenant, role=session.role)
    await services.access.audit(caller, "login.open", session.key_id)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(
        auth.COOKIE,
        secret,
        # How long it is good is the server's to say: this only clears it away.
        max_age=int(SESSION_AT_MOST.total_seconds()),
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post(
    "/logout",
    operation_id="logOut",
    response_class=RedirectResponse,
    status_code=303,
    response_description="The session is over.",
    openapi_extra=OPEN,
)
async def log_out(request: Request, services: Use) -> Response:
    """End the session, and forget its cookie."""
    auth.check_names(request, services)
    auth.check_same_origin(request)
    secret = request.cookies.get(auth.COOKIE)
    if secret is not None:
        await services.sessions.close(secret)
    answer = RedirectResponse("/", 303)
    answer.delete_cookie(auth.COOKIE, path="/", httponly=True, samesite="strict")
    return answer


@router.get("/v1/whoami", operation_id="whoAmI", responses=answer(WhoAmI))
async def whoami(caller: Reader) -> dict[str, Any]:
    """Tell whom the server takes the caller for."""
    until = caller.session_until
    return {
        "key_id": caller.key_id,
        "tenant": caller.tenant,
        "role": caller.role,
        "session": {"expires_at": until.isoformat()} if until else None,
    }
