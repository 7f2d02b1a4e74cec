"""A receiver of webhooks on loopback, that answers as it is told and remembers what it heard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

NEVER = "never"


@dataclass
class Heard:
    """One call, whole."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float = field(default_factory=time.monotonic)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def split(line: str) -> tuple[str, str, str]:
    return line.partition(": ")


class Receiver:
    """Answers each call with the next of `answers`, and the last of them ever after."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers) or ["204 No Content"]
        self.heard: list[Heard] = []
        self.port = 0
        self._closing = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @contextlib.asynccontextmanager
    async def open(
        self, *, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Receiver]:
        server = await asyncio.start_server(self._called, "127.0.0.1", port, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self._closing.set()
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def hears(self, count: int = 1, timeout_s: float = 20.0) -> list[Heard]:
        async with asyncio.timeout(timeout_s):
            while len(self.heard) < count:
                await asyncio.sleep(0.01)
        return self.heard

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *rest = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in map(split, rest)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.heard.append(Heard(line.split(" ")[1], headers, body))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if answer == NEVER:
                await self._closing.wait()
                return
            writer.write(f"HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n".encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._calls.discard(task)
            writer.close()
