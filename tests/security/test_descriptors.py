"""Open files: a command runs out of its own, and nobody else of theirs."""

from __future__ import annotations

import os
from pathlib import Path

from . import probe
from .conftest import MakeSandbox

EXHAUST = """
held = []
try:
    while len(held) < 200_000:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    word = name_of(error.errno)
"""


async def test_descriptors_run_out_for_the_command_alone(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox()

    held, word = await probe.ask(sandbox, EXHAUST + "answer([len(held), word])")

    assert word == "EMFILE"
    assert 1000 < held < 100_000
    assert await probe.answers(sandbox)


async def test_the_hard_limit_cannot_be_raised(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox()

    said = await probe.ask(
        sandbox,
        """
        import resource
        names = ("NOFILE", "NPROC", "CORE", "NICE", "RTPRIO", "MEMLOCK")
        said = {}
        for name in names:
            kind = getattr(resource, "RLIMIT_" + name)
            soft, hard = resource.getrlimit(kind)
            def put():
                try:
                    resource.setrlimit(kind, (hard + 1, hard + 1))
                except ValueError:
                    raise OSError(errno.EPERM, "not allowed")
            said[name] = [hard, attempt(put)]
        answer(said)
        """,
    )

    assert {word for _, word in said.values()} == {"EPERM"}, said
    assert said["CORE"][0] == 0, "a core dump starts a program on the host, where it is set up"
    assert said["RTPRIO"][0] == 0
    assert said["NICE"][0] == 0


async def test_many_hoards_at_once_leave_the_guest_and_the_host_theirs(
    make_sandbox: MakeSandbox,
) -> None:
    sandbox = await make_sandbox()
    code = probe.PRELUDE + EXHAUST + "answer(len(held))\ntime.sleep(30)"
    hoards = [await sandbox.start(["python3", "-c", code, "{}"]) for _ in range(8)]
    for hoard in hoards:
        async for _ in hoard.output():
            break

    assert await probe.answers(sandbox)
    assert len((await sandbox.files.list("/workspace")).entries) == 0
    with Path(os.devnull).open() as file:
        assert file.fileno() > 0
    for hoard in hoards:
        await hoard.kill()


async def test_descriptors_sent_in_circles_are_collected(make_sandbox: MakeSandbox) -> None:
    """Sockets that hold each other in flight: unreachable, uncounted, and the collector's work."""
    sandbox = await make_sandbox()
    sent = await probe.ask(
        sandbox,
        """
        sent = 0
        for _ in range(2000):
            one, other = socket.socketpair()
            try:
                socket.send_fds(one, [b"x"], [one.fileno(), other.fileno()])
                sent += 1
            except OSError:
                break
            one.close(), other.close()
        answer(sent)
        """,
    )

    assert sent > 100
    assert await probe.answers(sandbox)
