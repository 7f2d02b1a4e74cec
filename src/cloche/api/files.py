"""The files of a machine that lives: a sandbox's, or a job's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from cloche.api import sse
from cloche.api.answers import files as answers
from cloche.api.described import answer, both, bytes_body, content, event_stream, example
from cloche.core.errors import FileRefused
from cloche.core.job import Text, Value
from cloche.jobs.sandboxes import Opened
from cloche.sandbox import archives

_Path = Annotated[Text, Query(min_length=1, max_length=4096, examples=["hello.txt"])]
_Folder = Annotated[Text, Query(min_length=1, max_length=4096, examples=["/workspace"])]
_Form = Annotated[Literal["zip", "tar"], Query(alias="format", examples=["zip"])]
_WORKSPACE = "/workspace"
_ZIP: Final = "PK\x03\x04..."
_ARCHIVE: Final = both(
    content("application/zip", _ZIP), content("application/x-tar", "hello.txt...")
)


class Move(Value):
    """A file or folder, and its new name."""

    model_config = example({"path": "hello.txt", "to": "greetings/hello.txt"})

    path: Annotated[Text, Field(min_length=1, max_length=4096)]
    to: Annotated[Text, Field(min_length=1, max_length=4096)]


class NewFolder(Value):
    """A folder to make, with those on the way to it."""

    model_config = example({"path": "app/templates"})

    path: Annotated[Text, Field(min_length=1, max_length=4096)]


def add_routes(router: APIRouter, prefix: str, *, of: str, to_read: Any, to_change: Any) -> None:
    """Add the calls to a router; `to_read` and `to_change` open the machine of its path.

    `of` says whose files they are, in the calls' ids.
    """

    @router.get(
        f"{prefix}/files/list",
        operation_id=f"list{of}Files",
        responses=answer(answers.FileListing),
    )
    async def list_files(*, opened: Opened = to_read, path: _Folder = _WORKSPACE) -> dict[str, Any]:
        """List a folder."""
        listing = await opened.sandbox.files.list(path)
        return asdict(listing)

    @router.get(
        f"{prefix}/files/stat",
        operation_id=f"stat{of}File",
        responses=answer(answers.FileEntry),
    )
    async def stat(*, opened: Opened = to_read, path: _Path) -> dict[str, Any]:
        """Describe what is at a path; a link is described, not followed."""
        return asdict(await opened.sandbox.files.stat(path))

    @router.get(
        f"{prefix}/files/glob",
        operation_id=f"glob{of}Files",
        responses=answer(answers.FilePaths),
    )
    async def glob(
        *,
        opened: Opened = to_read,
        pattern: Annotated[Text, Query(min_length=1, max_length=4096, examples=["**/*.py"])],
        path: _Folder = _WORKSPACE,
    ) -> dict[str, Any]:
        """Find paths below a folder: `**/*.py`."""
        return asdict(await opened.sandbox.files.glob(pattern, path))

    @router.get(
        f"{prefix}/files/grep",
        operation_id=f"grep{of}Files",
        responses=answer(answers.FileMatches),
    )
    async def grep(
        *,
        opened: Opened = to_read,
        pattern: Annotated[Text, Query(min_length=1, max_length=4096, examples=["def main"])],
        path: _Folder = _WORKSPACE,
        glob: Annotated[Text | None, Query(max_length=4096, examples=["**/*.py"])] = None,
        fixed: Annotated[bool, Query(examples=[True])] = False,
        ignore_case: Annotated[bool, Query(examples=[True])] = False,
        limit: Annotated[int, Query(ge=1, le=10_000, examples=[1000])] = 1000,
    ) -> dict[str, Any]:
        """Find lines that match a regular expression, or a fixed text."""
        found = await opened.sandbox.files.grep(
            pattern, path, glob=glob, fixed=fixed, ignore_case=ignore_case, limit=limit
        )
        return asdict(found)

    @router.get(
        f"{prefix}/files/watch",
        operation_id=f"watch{of}Files",
        response_class=StreamingResponse,
        responses=event_stream(answers.CHANGE_STREAM),
    )
    async def watch(*, opened: Opened = to_read, path: _Folder = _WORKSPACE) -> Response:
        """Follow what changes below a folder, as server-sent events."""

        async def changes() -> AsyncGenerator[str, None]:
            async for change in opened.sandbox.files.watch(path):
                yield sse.line(change.kind, {"path": change.path})

        return sse.response(changes())

    @router.get(
        f"{prefix}/files",
        operation_id=f"read{of}File",
        response_class=Response,
        responses=content("application/octet-stream", "hello\n"),
    )
    async def read(
        *,
        opened: Opened = to_read,
        path: _Path,
        offset: Annotated[int, Query(ge=0, le=2**62, examples=[0])] = 0,
    ) -> Response:
        """Read a file of any size, from any byte."""
        entry = await opened.sandbox.files.stat(path)
        stream = opened.sandbox.files.stream(path, offset=offset)
        # The first piece now: what is wrong is told by a status, not by half an answer.
        first = await anext(stream, b"")

        async def pieces() -> AsyncIterator[bytes]:
            yield first
            async for data in stream:
                yield data

        name = PurePosixPath(entry.path).name
        return _download(pieces(), name, "application/octet-stream")

    @router.put(
        f"{prefix}/files",
        operation_id=f"write{of}File",
        status_code=204,
        openapi_extra=bytes_body("hello\n"),
    )
    async def write(
        *,
        request: Request,
        opened: Opened = to_change,
        path: _Path,
        mode: Annotated[
            int, Query(ge=0, le=0o777, description="As a decimal number.", examples=[0o644])
        ] = 0o644,
    ) -> None:
        """Write the body as a file: whoever reads meanwhile sees the old one or the new one."""
        await opened.sandbox.files.write(path, request.stream(), mode=mode)

    @router.post(f"{prefix}/files/folder", operation_id=f"make{of}Folder", status_code=204)
    async def make_folder(*, wanted: NewFolder, opened: Opened = to_change) -> None:
        """Make a folder, and those on the way to it."""
        await opened.sandbox.files.mkdir(wanted.path)

    @router.post(f"{prefix}/files/move", operation_id=f"move{of}File", status_code=204)
    async def move(*, wanted: Move, opened: Opened = to_change) -> None:
        """Give a file or folder another name."""
        await opened.sandbox.files.move(wanted.path, wanted.to)

    @router.delete(f"{prefix}/files", operation_id=f"remove{of}File", status_code=204)
    async def remove(
        *,
        opened: Opened = to_change,
        path: _Path,
        recursive: Annotated[bool, Query(examples=[True])] = False,
    ) -> None:
        """Remove a file or an empty folder; with `recursive`, a folder and all in it."""
        await opened.sandbox.files.remove(path, recursive=recursive)

    @router.get(
        f"{prefix}/files/archive",
        operation_id=f"download{of}Folder",
        response_class=Response,
        responses=_ARCHIVE,
    )
    async def download(
        *,
        opened: Opened = to_read,
        path: _Folder = _WORKSPACE,
        form: _Form = "zip",
    ) -> Response:
        """Download a folder, as a zip or a tar."""
        name = f"{PurePosixPath(path).name or 'files'}.{form}"
        if (await opened.sandbox.files.stat(path)).kind != "folder":
            raise FileRefused(f"{path} is no folder.", remedy="Read it as a file.")
        if form == "tar":
            return _download(opened.sandbox.files.download(path), name, "application/x-tar")
        plan = await archives.plan(opened.sandbox, ["**"], path)
        return _download(archives.zipped(opened.sandbox, plan), name, "application/zip")

    @router.put(
        f"{prefix}/files/archive",
        operation_id=f"unpackInto{of}Folder",
        status_code=204,
        openapi_extra=bytes_body(_ZIP),
    )
    async def upload(
        *,
        request: Request,
        opened: Opened = to_change,
        path: _Folder = _WORKSPACE,
        form: _Form = "zip",
    ) -> None:
        """Unpack the body into a folder. It is unpacked in the machine, by the machine's user."""
        if form == "tar":
            await opened.sandbox.files.upload(request.stream(), path)
        else:
            await archives.unpack_zip(opened.sandbox, request.stream(), path)


def _download(stream: AsyncIterator[bytes], name: str, media_type: str) -> Response:
    # Never shown as a page of ours: its content and its name are anyone's.
    headers = {
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(stream, headers=headers, media_type=media_type)
