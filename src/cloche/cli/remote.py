"""The commands that talk to a server: run, jobs, status, logs, cancel, download, keys, webhooks."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from cloche import settings
from cloche.cli.show import print_json
from cloche.core.errors import BadRequest, NotAuthenticated, ServerUnreachable, UserError
from cloche.core.job import State

EXIT_FAILED: Final = 1
_COLOURS: Final = {
    State.QUEUED: "yellow",
    State.RUNNING: "cyan",
    State.SUCCEEDED: "green",
    State.FAILED: "red",
    State.CANCELLED: "magenta",
}


class Refused(UserError):
    """The server's own words for what is wrong."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(
            str(problem.get("detail", "The server refused.")),
            remedy=str(problem.get("remedy", "See the server's log.")),
        )
        self.code = str(problem.get("code", "error"))  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Client:
    """A server, and our key to it."""

    http: httpx.AsyncClient

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls) -> AsyncIterator[Client]:
        chosen = settings.load()
        headers = {"authorization": f"Bearer {_key(chosen)}"}
        async with httpx.AsyncClient(base_url=chosen.url, headers=headers, timeout=60) as http:
            try:
                yield cls(http)
            except httpx.TransportError as error:
                raise ServerUnreachable(
                    f"No server answers at {chosen.url} ({type(error).__name__}).",
                    remedy="Start one with `cloche serve`, or set CLOCHE_URL.",
                ) from None

    async def call(self, method: str, path: str, **options: Any) -> Any:
        answer = await self.http.request(method, path, **options)
        _raise(answer)
        return answer.json() if answer.content else None

    async def events(self, job_id: str) -> AsyncIterator[dict[str, Any]]:
        """Follow a job to its end, taking a broken stream up where it was."""
        seen = 0
        while True:
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                async for _, event in self.stream_events(
                    "GET", f"/v1/jobs/{job_id}/events", headers={"last-event-id": str(seen)}
                ):
                    seen = event["seq"]
                    yield event
                    if event["kind"] == "finished":
                        return

    async def stream_events(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield a stream's events by name, as they come."""
        accept = {"accept": "text/event-stream", **(headers or {})}
        name = "message"
        async with self.http.stream(method, path, headers=accept, **options) as answer:
            if answer.is_error:
                await answer.aread()
                _raise(answer)
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))


def _raise(answer: httpx.Response) -> None:
    if answer.is_error:
        try:
            problem = answer.json()
        except ValueError:
            problem = {"detail": f"The server answered {answer.status_code}."}
        raise Refused(problem)


def _key(chosen: settings.Settings) -> str:
    if chosen.api_key:
        return chosen.api_key
    try:
        return chosen.key_file.read_text().strip()
    except OSError:
        raise NotAuthenticated(
            f"There is no API key: {chosen.key_file} cannot be read.",
            remedy="Set CLOCHE_API_KEY, or run this as the user who runs the server.",
        ) from None


async def run(request: Mapping[str, Any], download_to: Path | None) -> int:
    """Submit a job, follow it to its end, and download what it left."""
    async with Client.connect() as client:
        job = await client.call("POST", "/v1/jobs", json=request)
        say(f"job {job['id']}")
        async for event in client.events(job["id"]):
            _show(event)
        job = await client.call("GET", f"/v1/jobs/{job['id']}")
        if download_to is not None:
            await _download(client, job["id"], download_to)
    return _exit_code(job)


def _show(event: Mapping[str, Any]) -> None:
    body = event["body"]
    match event["kind"]:
        case "output":
            stream = sys.stderr if body["stream"] == "stderr" else sys.stdout
            stream.write(event["text"])
            stream.flush()
        case "machine":
            say(f"on machine {body['machine']}, {body['rung']} rung")
        case "step":
            say(f"step {body['step'] + 1}: {body['tool']}")
        case "retried":
            say(f"tried again: {body['why']}")
        case "artifacts" if body["files"]:
            say(f"kept {body['files']} files, {body['bytes']} bytes")
        case "finished":
            say(body["state"] + (f": {body['error']}" if body["error"] else ""))
        case _:
            pass


def say(text: str) -> None:
    sys.stderr.write(f"\033[2m· {text}\033[0m\n" if sys.stderr.isatty() else f"· {text}\n")


def _exit_code(job: Mapping[str, Any]) -> int:
    if job["state"] == State.SUCCEEDED:
        return 0
    return job["exit_code"] or EXIT_FAILED


async def list_jobs(*, states: list[str], limit: int, as_json: bool) -> None:
    async with Client.connect() as client:
        query = {"state": states, "limit": limit}
        found = await client.call("GET", "/v1/jobs", params=query)
    if as_json:
        print_json(found)
    else:
        _print_jobs(found["jobs"])


def _print_jobs(jobs: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("job", "state", "why", "what", "created"):
        table.add_column(title, no_wrap=title != "what")
    for job in jobs:
        request = job["request"]
        what = request.get("task") or request.get("code") or f"{len(request['steps'])} steps"
        state = f"[{_COLOURS[State(job['state'])]}]{job['state']}[/]"
        first = what.partition("\n")[0].replace("[", r"\[")[:60]
        table.add_row(job["id"], state, job["reason"] or "", first, job["created_at"][:19])
    Console(highlight=False).print(table)


async def status(job_id: str, *, as_json: bool) -> None:
    async with Client.connect() as client:
        job = await client.call("GET", f"/v1/jobs/{job_id}")
    if as_json:
        print_json(job)
        return
    for name in ("state", "reason", "exit_code", "error", "rung", "attempt", "created_at",
                 "started_at", "finished_at"):  # fmt: skip
        if job[name] is not None:
            sys.stdout.write(f"{name:>12}: {job[name]}\n")


async def logs(job_id: str, *, follow: bool) -> None:
    async with Client.connect() as client:
        if follow:
            async for event in client.events(job_id):
                if event["kind"] == "output":
                    sys.stdout.write(event["text"])
                    sys.stdout.flush()
            return
        offset = 0
        while True:
            answer = await client.http.get(f"/v1/jobs/{job_id}/logs", params={"offset": offset})
            _raise(answer)
            if not answer.content:
                return
            sys.stdout.buffer.write(answer.content)
            offset += len(answer.content)


async def cancel(job_id: str) -> None:
    async with Client.connect() as client:
        job = await client.call("POST", f"/v1/jobs/{job_id}/cancel")
    sys.stdout.write(f"{job['id']} {job['state']}\n")


async def download(job_id: str, target: Path) -> None:
    async with Client.connect() as client:
        await _download(client, job_id, target)


async def _download(client: Client, job_id: str, target: Path) -> None:
    await download_to(client, f"/v1/jobs/{job_id}/artifacts.zip", target)


async def download_to(client: Client, path: str, target: Path, **options: Any) -> None:
    """Put an answer's body into a file, whole or not at all; `-` is our own output."""
    if str(target) == "-":
        async with _body(client, path, options) as pieces:
            async for data in pieces:
                sys.stdout.buffer.write(data)
        return
    draft = target.with_suffix(f"{target.suffix}.part")
    try:
        async with _body(client, path, options) as pieces:
            with draft.open("wb") as file:
                async for data in pieces:
                    file.write(data)
        draft.replace(target)
    except OSError as error:
        raise BadRequest(
            f"{target} cannot be written: {error.strerror}.", remedy="Choose another place."
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    say(f"wrote {target}")


@contextlib.asynccontextmanager
async def _body(
    client: Client, path: str, options: Mapping[str, Any]
) -> AsyncIterator[AsyncIterator[bytes]]:
    async with client.http.stream("GET", path, **options) as answer:
        if answer.is_error:
            await answer.aread()
            _raise(answer)
        yield answer.aiter_bytes()


async def create_key(*, tenant: str, role: str, name: str) -> None:
    async with Client.connect() as client:
        made = await client.call(
            "POST", "/v1/keys", json={"tenant": tenant, "role": role, "name": name}
        )
    say(f"key {made['id']} of {made['tenant']}, {made['role']}; it is shown this once:")
    sys.stdout.write(made["key"] + "\n")


async def list_keys(*, as_json: bool) -> None:
    async with Client.connect() as client:
        found = await client.call("GET", "/v1/keys")
    if as_json:
        print_json(found)
        return
    for key in found["keys"]:
        revoked = " revoked" if key["revoked_at"] else ""
        sys.stdout.write(
            f"{key['id']} {key['tenant']:<16} {key['role']:<10} {key['name']}{revoked}\n"
        )


async def revoke_key(key_id: str) -> None:
    async with Client.connect() as client:
        await client.call("DELETE", f"/v1/keys/{key_id}")
    sys.stdout.write(f"{key_id} is revoked\n")


async def webhook_secret() -> None:
    async with Client.connect() as client:
        found = await client.call("GET", "/v1/webhooks/secret")
    sys.stdout.write(found["secret"] + "\n")
