"""Browsers are let in by a link that works once, and held to our own pages."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from serving import CLOCHE, KEY, Server

QUICK = {"kind": "shell", "code": "true"}
OPEN: list[httpx.Client] = []


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    server = Server(data, CLOCHE_POOL_SIZE="0")
    yield server
    server.stop()


class Browser:
    """What of a browser matters here: cookies, forms, and where a request comes from."""

    def __init__(self, server: Server) -> None:
        self.http = httpx.Client(base_url=server.client.base_url, follow_redirects=False)
        OPEN.append(self.http)
        self.origin = str(server.client.base_url).rstrip("/")

    def press(self, link: str, **headers: str) -> httpx.Response:
        """Open a link and press its button."""
        page = self.http.get(link)
        assert page.status_code == 200, page.text
        token = re.search(r'name="token" value="([^"]*)"', page.text)
        assert token is not None, page.text
        headers = {"origin": self.origin, **headers}
        return self.http.post("/login", data={"token": token[1]}, headers=headers)

    def post(self, path: str, origin: str | None, **headers: str) -> int:
        if origin is not None:
            headers["origin"] = origin
        return self.http.post(path, json=QUICK, headers=headers).status_code


def key(server: Server, role: str = "member", tenant: str = "a") -> dict[str, str]:
    made = server.client.post("/v1/keys", json={"tenant": tenant, "role": role}).json()
    return dict(made)


def link(server: Server, secret: str = KEY, **body: str) -> str:
    answer = httpx.post(
        server.client.base_url.join("/v1/login-links"), headers={"x-api-key": secret}, json=body
    )
    assert answer.status_code == 201, answer.text
    assert answer.json()["url"].startswith(str(server.client.base_url).rstrip("/"))
    return str(answer.json()["url"])


def let_in(server: Server, secret: str = KEY, **body: str) -> Browser:
    browser = Browser(server)
    assert browser.press(link(server, secret, **body)).status_code == 303
    return browser


def test_a_link_lets_a_browser_in(server: Server) -> None:
    made = key(server)
    browser = Browser(server)
    outside = browser.http.get("/")
    assert (outside.status_code, "cloche open" in outside.text) == (401, True)

    answer = browser.press(link(server, made["key"]))

    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    whoami = browser.http.get("/v1/whoami").json()
    assert (whoami["key_id"], whoami["tenant"], whoami["role"]) == (made["id"], "a", "member")
    assert whoami["session"]["expires_at"]
    home = browser.http.get("/")
    assert (home.status_code, "/docs" in home.text) == (200, True)
    assert server.client.get("/v1/whoami").json()["session"] is None
    actions = {entry["action"] for entry in server.client.get("/v1/audit").json()["entries"]}
    assert {"login.link", "login.open"} <= actions


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(server: Server) -> None:
    answer = Browser(server).press(link(server))
    said = answer.headers["set-cookie"]
    cookie = SimpleCookie(said)["cloche_session"]

    assert len(cookie.value) == 43, "256 bits"
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    assert not cookie["secure"]
    assert not cookie["domain"]


def test_the_cookie_is_for_https_alone_where_the_request_came_by_it(server: Server) -> None:
    browser = Browser(server)
    origin = browser.origin.replace("http:", "https:")
    # As from a proxy on this host that ends TLS.
    answer = browser.press(link(server), origin=origin, **{"x-forwarded-proto": "https"})

    assert answer.status_code == 303, answer.text
    assert SimpleCookie(answer.headers["set-cookie"])["cloche_session"]["secure"]


def test_a_preview_of_the_link_does_not_use_it_up(server: Server) -> None:
    made = link(server)
    for method in ("GET", "HEAD", "GET"):
        assert httpx.request(method, made).status_code in (200, 405)

    assert Browser(server).press(made).status_code == 303


def test_a_link_works_once(server: Server) -> None:
    made = link(server)
    assert Browser(server).press(made).status_code == 303
    second = Browser(server)

    answer = second.press(made)

    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)
    assert "cloche open" in answer.text
    assert second.http.get("/v1/whoami").status_code == 401


def test_old_links_and_sessions_open_nothing(server: Server) -> None:
    made, browser = link(server), let_in(server)
    assert browser.http.get("/v1/whoami").status_code == 200
    with sqlite3.connect(server.data / "cloche.db", timeout=30) as database:
        database.execute("UPDATE login_links SET expires_at = 1")
        database.execute("UPDATE browser_sessions SET expires_at = 1")
    database.close()

    assert Browser(server).press(made).status_code == 403
    assert browser.http.get("/v1/whoami").status_code == 401
    assert browser.http.get("/").status_code == 401


def test_the_pages_let_nothing_else_in(server: Server) -> None:
    for page in (
        httpx.get(link(server)),
        httpx.get(server.client.base_url),
        let_in(server).http.get("/"),
    ):
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["cache-control"] == "no-store"
        assert "://" not in page.text, "something from elsewhere"


def test_a_token_cannot_break_out_of_the_page(server: Server) -> None:
    page = httpx.get(
        server.client.base_url.join("/login"), params={"token": '"><script>alert(1)</script>'}
    )
    assert "<script>" not in page.text


def test_where_to_go_after_login_is_not_the_links_to_say(server: Server) -> None:
    made = link(server) + "&next=https://evil.example/"
    answer = Browser(server).press(made)
    assert answer.headers["location"] == "/"


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "null",
        "http://evil.example",
        "http://127.0.0.1",
        "http://127.0.0.1:1",
        "http://localhost:{port}",
        "https://127.0.0.1:{port}",
        "http://127.0.0.1:{port}.evil.example",
    ],
)
def test_another_page_cannot_use_the_cookie_to_change_anything(
    server: Server, origin: str | None
) -> None:
    browser = let_in(server)
    port = server.client.base_url.port
    given = origin.format(port=port) if origin else None
    before = server.client.get("/readyz").json()["jobs"]

    for path in ("/schedule", "/v1/jobs", "/v1/keys", "/v1/login-links", "/logout"):
        assert browser.post(path, given) == 403, path
        assert browser.post(path, given, **{"sec-fetch-site": "same-site"}) == 403, path
    headers = {"origin": given} if given else {}
    assert browser.http.put("/v1/tenants/a/quota", json={}, headers=headers).status_code == 403
    assert browser.http.delete("/v1/keys/x", headers=headers).status_code == 403
    token = link(server).partition("token=")[2]
    form = browser.http.post("/login", data={"token": token}, headers=headers)
    assert form.status_code == 403

    assert server.client.get("/readyz").json()["jobs"] == before
    assert browser.http.get("/v1/whoami").status_code == 200, "it was logged out"


def test_our_own_page_may_change_things(server: Server) -> None:
    browser = let_in(server)
    assert browser.post("/v1/jobs", browser.origin) == 201
    assert browser.post("/v1/jobs", None, **{"sec-fetch-site": "same-origin"}) == 201


def test_a_key_needs_no_origin_even_beside_a_cookie(server: Server) -> None:
    browser = let_in(server, key(server, "read-only")["key"])
    answer = browser.http.post("/v1/jobs", json=QUICK, headers={"x-api-key": KEY})
    assert answer.status_code == 201, answer.text


def test_a_session_may_do_what_its_role_may(server: Server) -> None:
    browser = let_in(server, key(server, "read-only")["key"])
    assert browser.http.get("/v1/jobs").status_code == 200
    assert browser.post("/v1/jobs", browser.origin) == 403
    lesser = let_in(server, KEY, role="read-only")
    assert lesser.http.get("/v1/whoami").json()["role"] == "read-only"
    assert lesser.http.get("/v1/keys").status_code == 403


def test_a_link_is_never_for_more_than_its_key(server: Server) -> None:
    headers = {"x-api-key": key(server, "member")["key"]}
    url = server.client.base_url.join("/v1/login-links")
    assert httpx.post(url, headers=headers, json={"role": "admin"}).status_code == 403
    assert httpx.post(url, headers=headers, json={"role": "king"}).status_code == 400
    assert httpx.post(url, headers=headers).status_code == 201
    assert httpx.post(url).status_code == 401


def test_a_session_makes_no_links(server: Server) -> None:
    browser = let_in(server)
    assert browser.post("/v1/login-links", browser.origin) == 400, "the body is a job's"
    answer = browser.http.post("/v1/login-links", headers={"origin": browser.origin})
    assert answer.status_code == 403, answer.text


def test_logging_out_ends_the_session_everywhere(server: Server) -> None:
    browser = let_in(server)
    stolen = dict(browser.http.cookies)

    answer = browser.http.post("/logout", headers={"origin": browser.origin})

    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert not browser.http.cookies
    url = server.client.base_url.join("/v1/whoami")
    assert httpx.get(url, cookies=stolen).status_code == 401


def test_links_and_sessions_end_with_their_key(server: Server) -> None:
    made = key(server)
    unused, browser = link(server, made["key"]), let_in(server, made["key"])
    assert browser.http.get("/v1/whoami").status_code == 200

    server.client.delete(f"/v1/keys/{made['id']}")

    assert browser.http.get("/v1/whoami").status_code == 401
    assert Browser(server).press(unused).status_code == 403


def test_sessions_outlive_a_restart_but_not_a_new_key_in_the_environment(
    tmp_path: Path, data: Path
) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(tmp_path, CLOCHE_POOL_SIZE="0")
    cookies = dict(let_in(server).http.cookies)

    def status() -> int:
        url = server.client.base_url.join("/v1/whoami")
        return httpx.get(url, cookies=cookies).status_code

    try:
        server.stop()
        server.start()
        assert status() == 200
        server.stop()
        server._environment["CLOCHE_API_KEY"] = "another-key-for-the-tests"
        server.start()
        assert status() == 401
    finally:
        server.stop()


def test_the_command_line_prints_a_link(server: Server) -> None:
    done = subprocess.run(
        [*CLOCHE, "open", "--role", "member", "--browser"],
        env={
            **{name: value for name, value in os.environ.items() if "DISPLAY" not in name},
            "CLOCHE_API_KEY": KEY,
            "CLOCHE_URL": str(server.client.base_url),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no browser" in done.stderr

    browser = Browser(server)
    assert browser.press(done.stdout.strip()).status_code == 303
    assert browser.http.get("/v1/whoami").json()["role"] == "member"


def test_nobody_needs_a_link_where_authentication_is_off(tmp_path: Path, data: Path) -> None:
    (tmp_path / "images").symlink_to(data / "images")
    server = Server(tmp_path, CLOCHE_AUTH="off", CLOCHE_API_KEY="", CLOCHE_POOL_SIZE="0")
    try:
        base = server.client.base_url
        assert httpx.get(base).status_code == 200
        refused = httpx.post(base.join("/v1/login-links"))
        assert (refused.status_code, "Open http" in refused.json()["remedy"]) == (400, True)
    finally:
        server.stop()
