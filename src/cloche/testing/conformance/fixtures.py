"""The fixtures that the checks share.

A backend's author provides two, `maker` and `image`, of session scope, and may
replace any of these: see the package's docstring.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

import pytest
import pytest_asyncio

from cloche.core.image import Image
from cloche.core.machine import Backend
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox
from cloche.testing.maker import Maker


class NewSandbox(Protocol):
    """Starts a machine for one check; it is destroyed when the check is over."""

    def __call__(
        self, spec: SandboxSpec | None = None, *, durable: bool = False
    ) -> Awaitable[Sandbox]: ...


@pytest.fixture(scope="session")
def time_scale() -> float:
    """How many times slower than a plain process a machine is: 16, say, under emulation."""
    return 1.0


@pytest.fixture(scope="session")
def backend(maker: Maker) -> Backend:
    return maker.make()


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def sandbox(backend: Backend, image: Image) -> AsyncIterator[Sandbox]:
    """One machine for all checks of a class: they keep out of each other's way."""
    async with await Sandbox.start_on(backend, SandboxSpec(), image) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def new_sandbox(backend: Backend, image: Image) -> AsyncIterator[NewSandbox]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(spec: SandboxSpec | None = None, *, durable: bool = False) -> Sandbox:
            started = await Sandbox.start_on(backend, spec or SandboxSpec(), image, durable=durable)
            return await stack.enter_async_context(started)

        yield start


@pytest_asyncio.fixture(loop_scope="session")
async def folder(sandbox: Sandbox, request: pytest.FixtureRequest) -> str:
    """An empty folder in the class's machine that is this check's own."""
    path = "/workspace/" + re.sub(r"\W+", "-", request.node.name).strip("-")
    await sandbox.files.mkdir(path)
    return path
