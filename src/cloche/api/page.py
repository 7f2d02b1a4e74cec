"""What a browser is shown: plain pages, with nothing from elsewhere in them."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cloche import __version__
from cloche.api import auth
from cloche.api.services import Services, Use
from cloche.core.access import Caller
from cloche.core.errors import NotAuthenticated

router = APIRouter(tags=["page"], include_in_schema=False)

_STYLE: Final = """
body { font: 16px/1.6 system-ui, sans-serif; max-width: 40rem; margin: 12vh auto; padding: 0 1rem;
       color: #1c2b22; background: #f6faf7; }
h1 { font-size: 1.6rem; } code { background: #e3eee7; padding: .1em .35em; border-radius: .3em; }
button { font: inherit; padding: .5em 1.2em; border: 0; border-radius: .4em; color: #fff;
         background: #22744a; cursor: pointer; }
@media (prefers-color-scheme: dark) {
  body { color: #dbe7df; background: #14201a; } code { background: #24352c; } a { color: #7fd0a4; }
}
"""
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS: Final = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
    "cache-control": "no-store",
    # Not `no-referrer`: with that, browsers send `Origin: null` with our own forms.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-robots-tag": "noindex",
}


def document(title: str, body: str, status: int = 200) -> HTMLResponse:
    """Make a page of a title, which is escaped here, and of HTML."""
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>{body}</html>"
    )
    return HTMLResponse(text, status, dict(_HEADERS))


@router.get("/", response_class=HTMLResponse)
async def home(request: Request, services: Use) -> HTMLResponse:
    """Show how things are to those who were let in, and to others how to get in."""
    try:
        caller = await auth.identify(request, services)
    except NotAuthenticated:
        return document(
            "Cloche",
            "<p>This server runs code under glass, and lets in those who have a link.</p>"
            "<p>To get one, run <code>cloche open</code> where the server runs, or wherever you "
            "have a key for it. The link works once, within ten minutes.</p>",
            401,
        )
    return await _status(caller, services)


async def _status(caller: Caller, services: Services) -> HTMLResponse:
    counts = await services.queue.counts()
    jobs = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    whole = f"<p>Jobs: {escape(jobs) or 'none yet'}.</p>" if auth.scope(caller) is None else ""
    leave = (
        '<form method="post" action="/logout"><button>Log out</button></form>'
        if caller.session_until
        else ""
    )
    machines = (
        f"giving machines of the <b>{escape(services.rung)}</b> rung"
        if services.rung
        else "leaving machines to workers"
    )
    return document(
        "Cloche is up",
        f"<p>Version {escape(__version__)}, {machines}. "
        f"You are <b>{escape(caller.role)}</b> of <b>{escape(caller.tenant)}</b>.</p>{whole}"
        '<p>Every call, with examples, is at <a href="/docs">/docs</a>.</p>'
        "<p>A first job: <code>cloche run --python 'print(6*7)'</code></p>" + leave,
    )
