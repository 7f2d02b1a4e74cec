"""`cloche up`: a server from nothing, and a word on how to go on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.markup import escape

from cloche import settings
from cloche.app import Host
from cloche.cli import begin
from cloche.cli.image import reporting
from cloche.core.errors import BadSettings, ImageMissing
from cloche.core.rung import Rung
from cloche.sandbox.images import Images
from cloche.serve import Running, check_door, listening
from cloche.serve import serve as run_server

IN_WORDS: Final = {
    Rung.FIRECRACKER: "each a virtual machine with a kernel of its own, jailed",
    Rung.QEMU: "each a virtual machine with a kernel of its own",
    Rung.GVISOR: "each behind a kernel written in Go, which stands between it and this host's",
    Rung.CONTAINER: "each in namespaces of its own, without capabilities or network; "
    "the kernel is this host's",
    Rung.DOCKER: "each a container of the Docker daemon; the kernel is this host's",
}


async def up(host: str, port: int, data: Path | None) -> None:
    """Serve until a signal says to stop, with an image made sure of before."""
    chosen = begin.prepare(data)
    if not chosen.slots:
        raise BadSettings(
            "`cloche up` starts a server with machines, and CLOCHE_SLOTS=0 is one without.",
            remedy="Unset CLOCHE_SLOTS, or use `cloche serve`.",
        )
    check_door(chosen, host)
    here = Host.from_settings(chosen)
    try:
        # What would stop the server must not show after minutes of building.
        await here.backend.check()
        with listening(host, port):
            await ensure_image(here.images, chosen.apt_sources, offer)
    finally:
        here.backend.close()

    async def on_ready(running: Running) -> None:
        show(banner(running, chosen, await running.link()))

    await run_server(chosen, host=host, port=port, on_ready=on_ready)


async def ensure_image(
    images: Images, apt_sources: Path | None, may_build: Callable[[str], bool]
) -> None:
    """Build the machine image unless it is there.

    Raises:
        ImageMissing: it is not there, and is not to be built.
        ImageCorrupt: it is damaged.
        ImageBuildFailed: it could not be built.
    """
    try:
        images.find()
    except ImageMissing as error:
        if not may_build(error.message):
            raise
        with reporting() as report:
            await images.build(progress=report, apt_sources=apt_sources)


def offer(why: str) -> bool:
    """Ask on a terminal whether to build; elsewhere nobody is there to ask."""
    sys.stderr.write(f"{why}\n")
    if sys.stdin.isatty() and sys.stderr.isatty():
        return typer.confirm("Build it now? It takes some minutes", default=True, err=True)
    sys.stderr.write("Building it now; this takes some minutes.\n")
    return True


def banner(running: Running, chosen: settings.Settings, link: str | None) -> str:
    """Say what there is and how to go on, in rich's markup."""
    count = running.pool_size
    warming = f"warming {count} in the background" if count else "each started when it is needed"
    url, rung = escape(running.url), Rung(str(running.rung))  # `up` never starts without machines.
    lines = [
        f"[bold green]Cloche is at[/] {url}, giving machines of the {rung} rung.",
        f"  [dim]walls:[/]     {IN_WORDS[rung]}",
        f"  [dim]runtime:[/]   {escape(running.runtime)}",
        f"  [dim]machines:[/]  {warming}",
        f"  [dim]key:[/]       {escape(_key(running, chosen))}",
    ]
    if link is not None:
        lines += [
            "",
            "[bold]Open it in a browser[/], within ten minutes; `cloche open` prints another link:",
            f"  {escape(link)}",
        ]
    lines += [
        "",
        "[bold]Run a first job[/] in another terminal:",
        f"  {escape(_command(running, chosen))}",
        "",
        "Ctrl-C stops the server; running jobs go on, and the next start takes them up.",
    ]
    return "\n".join(lines)


def show(text: str) -> None:
    # On a line of its own however narrow the terminal is: a broken link opens nothing.
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def _key(running: Running, chosen: settings.Settings) -> str:
    if chosen.auth == "off":
        return "none is needed: CLOCHE_AUTH is off"
    if running.key_file is not None:
        return f"in {running.key_file}"
    return "the one in CLOCHE_API_KEY" if chosen.api_key else "one you have made before"


def _command(running: Running, chosen: settings.Settings) -> str:
    """Return a command that finds this server from a new terminal."""
    fields = settings.Settings.model_fields
    wanted = {"CLOCHE_URL": (running.url, fields["url"].default)}
    if running.key_file is not None:
        usual = fields["data"].get_default(call_default_factory=True)
        wanted["CLOCHE_DATA"] = (str(chosen.data), str(usual))
    variables = {name: value for name, (value, usual) in wanted.items() if value != usual}
    given = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    return f"{given}cloche run --python 'print(6*7)'"
