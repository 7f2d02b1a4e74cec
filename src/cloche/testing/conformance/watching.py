"""Watching files: what changes is told as it happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from cloche.core.errors import ClocheError, MachineFull, NoSuchFile, PathRefused
from cloche.core.files import Change
from cloche.sandbox.sandbox import Sandbox


@pytest.mark.asyncio(loop_scope="session")
class TestWatch:
    """Changes, as they happen."""

    async def test_changes_are_told_as_they_happen(self, sandbox: Sandbox, folder: str) -> None:
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            begun = await _begun(sandbox, folder, changes)
            script = (
                "echo 1 > made; mv made moved; chmod 600 moved; rm moved; "
                "mkdir sub; sleep 0.2; echo 2 > sub/inner"
            )
            await sandbox.exec(["sh", "-c", script], cwd=folder)
            seen = await _until(changes, Change(kind="changed", path=f"{folder}/sub/inner"), begun)

        for kind, name in [
            ("created", "made"), ("changed", "made"), ("removed", "made"), ("created", "moved"),
            ("changed", "moved"), ("removed", "moved"), ("created", "sub"),
        ]:  # fmt: skip
            assert (kind, f"{folder}/{name}") in [(c.kind, c.path) for c in seen], seen

    async def test_files_written_by_the_host_are_told_too(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            begun = await _begun(sandbox, folder, changes)
            await sandbox.files.write(f"{folder}/file", b"x")
            await _until(changes, Change(kind="created", path=f"{folder}/file"), begun)

    async def test_what_is_put_into_a_new_folder_at_once_is_told(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            begun = await _begun(sandbox, folder, changes)
            for number in range(20):
                script = f"mkdir -p d{number}/a/b && echo x > d{number}/a/b/file"
                await sandbox.exec(["sh", "-c", script], cwd=folder)
            last = Change(kind="created", path=f"{folder}/d19/a/b/file")
            seen = await _until(changes, last, begun)

        told = {change.path for change in seen}
        missed = [n for n in range(20) if f"{folder}/d{n}/a/b/file" not in told]
        assert missed == []

    async def test_a_watch_follows_a_link_that_stays_inside(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.exec(["sh", "-c", "mkdir real; ln -s real link"], cwd=folder)
        async with contextlib.aclosing(sandbox.files.watch(f"{folder}/link")) as changes:
            begun = await _begun(sandbox, f"{folder}/real", changes)
            await sandbox.files.write(f"{folder}/real/file", b"x")
            await _until(changes, Change(kind="created", path=f"{folder}/real/file"), begun)

    async def test_a_folder_that_may_not_be_read_does_not_spoil_a_watch(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.exec(["sh", "-c", "mkdir locked; chmod 0 locked"], cwd=folder)
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            begun = await _begun(sandbox, folder, changes)
            await sandbox.exec(["sh", "-c", "mkdir -m 0 more; ln -s /etc etc; touch x"], cwd=folder)
            await _until(changes, Change(kind="created", path=f"{folder}/x"), begun)

    async def test_a_tree_too_large_to_watch_is_refused_and_let_go(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.exec(["sh", "-c", "mkdir $(seq 5000)"], cwd=folder)
        # Linux grants a user 128 watches at a time, unless told otherwise.
        for _ in range(140):
            with pytest.raises(MachineFull):
                await anext(sandbox.files.watch(folder))

        async with contextlib.aclosing(sandbox.files.watch(f"{folder}/1")) as changes:
            await _begun(sandbox, f"{folder}/1", changes)

    async def test_a_tree_that_grows_too_large_says_that_it_misses_changes(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            begun = await _begun(sandbox, folder, changes)
            await sandbox.exec(["sh", "-c", "mkdir $(seq 5000)"], cwd=folder)
            await _until(changes, Change(kind="overflow", path=""), begun)

    async def test_a_watch_needs_a_folder_inside(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/file", b"")
        await sandbox.exec(["ln", "-s", "/etc", "etc"], cwd=folder)
        for path, error in [
            ("/etc", PathRefused),
            (f"{folder}/etc", PathRefused),
            (f"{folder}/nothing", NoSuchFile),
            (f"{folder}/file", ClocheError),
        ]:
            with pytest.raises(error):
                await anext(sandbox.files.watch(path))

    async def test_watches_that_were_left_are_let_go(self, sandbox: Sandbox, folder: str) -> None:
        # Linux grants a user 128 at a time, unless told otherwise.
        for _ in range(150):
            async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
                task = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        async with contextlib.aclosing(sandbox.files.watch(folder)) as changes:
            await _begun(sandbox, folder, changes)


async def _begun(
    sandbox: Sandbox, folder: str, changes: AsyncGenerator[Change, None]
) -> asyncio.Future[Change]:
    """Touch files until one is told of: from then on the watch misses nothing.

    Returns the wait for the change that comes next.
    """
    first = asyncio.ensure_future(anext(changes))
    for number in range(200):
        await sandbox.files.write(f"{folder}/probe-{number}", b"")
        done, _ = await asyncio.wait([first], timeout=0.05)
        if done:
            return asyncio.ensure_future(anext(changes))
    raise AssertionError("the watch never told of anything")


async def _until(
    changes: AsyncGenerator[Change, None], last: Change, upcoming: asyncio.Future[Change]
) -> list[Change]:
    seen: list[Change] = []
    try:
        async with asyncio.timeout(10):
            while last not in seen:
                seen.append(await upcoming)
                upcoming = asyncio.ensure_future(anext(changes))
    except TimeoutError:
        raise AssertionError(f"{last} was not told; seen {seen}") from None
    finally:
        upcoming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await upcoming
    return seen
