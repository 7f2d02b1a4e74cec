"""What `cloche sandbox` and `cloche files` do."""

from __future__ import annotations

import asyncio
import os
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from cloche.cli.remote import Client, Refused, download_to, say
from cloche.cli.show import EXIT_TIMEOUT, print_json

_PIECE_BYTES: Final = 1 << 20


async def create(order: dict[str, Any], *, as_json: bool) -> None:
    async with Client.connect() as client:
        made = await client.call("POST", "/v1/sandboxes", json=order)
    if as_json:
        print_json(made)
    else:
        say(f"a sandbox of the {made['rung']} rung, until {made['expires_at'][:19]}")
        sys.stdout.write(made["id"] + "\n")


async def list_sandboxes(*, ended: bool, as_json: bool) -> None:
    async with Client.connect() as client:
        found = await client.call("GET", "/v1/sandboxes", params={"ended": ended})
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("sandbox", "state", "rung", "size", "job", "until"):
        table.add_column(title, no_wrap=True)
    for one in found["sandboxes"]:
        state = one["state"] if one["reason"] is None else f"{one['state']}: {one['reason']}"
        size = f"{one['limits']['vcpus']} cpu, {one['limits']['memory_mib']} MiB"
        until = one["ended_at"] or one["expires_at"]
        table.add_row(one["id"], state, one["rung"], size, one["job"] or "", until[:19])
    Console(highlight=False).print(table)


async def execute(sandbox_id: str, argv: Sequence[str], timeout_s: float) -> int:
    body = {"argv": list(argv), "timeout_s": timeout_s}
    async with Client.connect() as client:
        async for event, data in client.stream_events(
            "POST", f"/v1/sandboxes/{sandbox_id}/exec", json=body
        ):
            match event:
                case "output":
                    stream = sys.stderr if data["stream"] == "stderr" else sys.stdout
                    stream.write(data["text"])
                    stream.flush()
                case "error":
                    raise Refused(data)
                case "exit":
                    return EXIT_TIMEOUT if data["timed_out"] else int(data["exit_code"])
                case _:
                    pass
    raise Refused({"detail": "The stream ended before the command."})


async def change(sandbox_id: str, action: str, body: dict[str, Any] | None) -> None:
    async with Client.connect() as client:
        now = await client.call("POST", f"/v1/sandboxes/{sandbox_id}/{action}", json=body)
    sys.stdout.write(f"{now['id']} {now['state']} until {now['expires_at'][:19]}\n")


async def delete(sandbox_id: str) -> None:
    async with Client.connect() as client:
        await client.call("DELETE", f"/v1/sandboxes/{sandbox_id}")
    sys.stdout.write(f"{sandbox_id} is no more\n")


async def _files_of(client: Client, target: str) -> str:
    """Return where the files of a sandbox or job are."""
    try:
        await client.call("GET", f"/v1/sandboxes/{target}")
    except Refused as refused:
        if refused.code != "no_such_sandbox":
            raise
        return f"/v1/jobs/{target}/files"
    return f"/v1/sandboxes/{target}/files"


async def list_files(target: str, path: str, *, as_json: bool) -> None:
    async with Client.connect() as client:
        base = await _files_of(client, target)
        listing = await client.call("GET", f"{base}/list", params={"path": path})
    if as_json:
        print_json(listing)
        return
    for entry in listing["entries"]:
        mark = "/" if entry["kind"] == "folder" else ""
        name = entry["path"].removeprefix(path.rstrip("/") + "/")
        sys.stdout.write(f"{entry['size']:>12} {_printable(name)}{mark}\n")
    if listing["truncated"]:
        say("there are more than one answer holds")


def _printable(name: str) -> str:
    """Make a name from a machine safe to print: it may hold what acts on a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


async def get(target: str, path: str, to: Path | None) -> None:
    async with Client.connect() as client:
        base = await _files_of(client, target)
        entry = await client.call("GET", f"{base}/stat", params={"path": path})
        is_folder = entry["kind"] == "folder"
        query = {"path": path}
        url = f"{base}/archive" if is_folder else base
        name = Path(path).name or "files"
        place = to or Path(f"{name}.zip" if is_folder else name)
        await download_to(client, url, place, params=query)


async def put(target: str, source: Path, path: str) -> None:
    async with Client.connect() as client:
        base = await _files_of(client, target)
        if (mode := _mode(source)) is not None:
            with source.open("rb") as file:
                query = {"path": path, "mode": str(mode)}
                await client.call("PUT", base, params=query, content=_pieces(file), timeout=None)
            return
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(_pack, source, archive)
            archive.seek(0)
            query = {"path": path, "format": "tar"}
            await client.call(
                "PUT", f"{base}/archive", params=query, content=_pieces(archive), timeout=None
            )


def _mode(source: Path) -> int | None:
    """Return a file's mode for the machine's user; None for a folder."""
    return None if source.is_dir() else source.stat().st_mode & 0o777 | 0o600


def _pack(source: Path, archive: BinaryIO) -> None:
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in sorted(os.listdir(source)):  # noqa: PTH208 - names, not paths
            tar.add(source / name, arcname=name)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield data


async def move(target: str, path: str, to: str) -> None:
    async with Client.connect() as client:
        base = await _files_of(client, target)
        await client.call("POST", f"{base}/move", json={"path": path, "to": to})


async def remove(target: str, path: str, *, recursive: bool) -> None:
    async with Client.connect() as client:
        base = await _files_of(client, target)
        await client.call("DELETE", base, params={"path": path, "recursive": recursive})
