"""Machines to attack, kept in a data folder of the test run's own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from cloche import app
from cloche.backends import container
from cloche.core.image import Image
from cloche.core.spec import SandboxSpec
from cloche.sandbox.sandbox import Sandbox

from . import probe

MakeSandbox = Callable[..., Awaitable[Sandbox]]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of the host whose machines are attacked."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def image() -> Image:
    return app.Host.from_settings().image("base")


@pytest.fixture(scope="session")
async def backend(data: Path) -> AsyncIterator[container.Backend]:
    backend = container.Backend(data)
    yield backend
    backend.close()
    assert list(data.glob("machines/*")) == [], "a machine outlived its test"


@pytest.fixture(scope="module")
async def sandbox(backend: container.Backend, image: Image) -> AsyncIterator[Sandbox]:
    """One machine for all tests of a file: for attacks that leave nothing behind."""
    spec = SandboxSpec(memory_mib=512, disk_mib=512, pids=256)
    async with await Sandbox.start_on(backend, spec, image) as sandbox:
        yield sandbox


@pytest.fixture
async def make_sandbox(backend: container.Backend, image: Image) -> AsyncIterator[MakeSandbox]:
    """Make machines for one test alone: for attacks that may cost the machine its life."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**limits: int) -> Sandbox:
            spec = SandboxSpec(**{"memory_mib": 512, "disk_mib": 512, "pids": 256, **limits})
            return await stack.enter_async_context(await Sandbox.start_on(backend, spec, image))

        yield make


@pytest.fixture(scope="module")
async def numbers(sandbox: Sandbox) -> dict[str, int]:
    """The machine's system calls by name, from its own C headers."""
    return await probe.syscall_numbers(sandbox)
