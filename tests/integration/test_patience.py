"""A guest that is busy says so, and is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cloche import settings
from cloche.backends import container
from cloche.core.spec import SandboxSpec
from cloche.sandbox import client
from cloche.sandbox.images import Images
from cloche.sandbox.sandbox import Sandbox

PATIENCE_S = 6.5
"""Longer than the guest's 5 s between two signs of life, shorter than what it is busy for."""


async def test_calls_that_take_longer_than_the_hosts_patience_go_through(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = container.Backend(data)
    image = Images(settings.load().data).find()
    async with await Sandbox.start_on(backend, SandboxSpec(), image) as sandbox:
        monkeypatch.setattr(client, "ANSWER_S", PATIENCE_S)
        late = await sandbox.start(["sh", "-c", "sleep 9; wc -c"], stdin=True)

        silent, _, fed = await asyncio.gather(
            sandbox.exec(["sleep", "9"]),
            late.write(b"x" * 1_000_000, close=True),
            sandbox.exec(["sh", "-c", "sleep 9; wc -c"], stdin=b"x" * 1_000_000),
        )

        assert silent.exit_code == 0
        assert fed.stdout.strip() == "1000000"
        said = b"".join([chunk.data async for chunk in late.output()])
        assert said.strip() == b"1000000"
    backend.close()
