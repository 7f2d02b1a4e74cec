"""`cloche sandbox` and `cloche files`: machines on a server, with their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

sandbox = typer.Typer(
    name="sandbox",
    help="Make, use and end sandboxes on a server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
files = typer.Typer(
    name="files",
    help="The files of a sandbox, or of a job while its machine lives.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
SandboxId = Annotated[str, typer.Argument(help="The sandbox's id.")]
Target = Annotated[str, typer.Argument(help="The id of a sandbox or of a job.")]
Inside = Annotated[str, typer.Argument(help="A path in the machine.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(sandbox, name="sandbox")
    app.add_typer(files, name="files")


@sandbox.command()
def create(
    *,
    ttl: Annotated[float, typer.Option(metavar="SECONDS", help="How long it stands.")] = 3600,
    idle: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End it when unused for this long.")
    ] = None,
    vcpus: Annotated[int, typer.Option(help="Processors.")] = 2,
    memory: Annotated[int, typer.Option(metavar="MIB", help="Memory.")] = 2048,
    disk: Annotated[int, typer.Option(metavar="MIB", help="Disk.")] = 8192,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="A variable.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="A label.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a sandbox and print its id."""
    from cloche.cli import show, standing
    from cloche.cli.execute import parse_env

    order: dict[str, Any] = {
        "ttl_s": ttl,
        "idle_s": idle,
        "limits": {"vcpus": vcpus, "memory_mib": memory, "disk_mib": disk},
        "env": parse_env(env or []),
        "labels": parse_env(label or [], option="--label"),
    }
    show.run(standing.create(order, as_json=as_json))


@sandbox.command(name="list")
def list_(
    *,
    ended: Annotated[bool, typer.Option("--ended", help="Also those that are no more.")] = False,
    as_json: Json = False,
) -> None:
    """List sandboxes, newest first."""
    from cloche.cli import show, standing

    show.run(standing.list_sandboxes(ended=ended, as_json=as_json))


@sandbox.command(name="exec", context_settings={"allow_interspersed_args": False})
def exec_(
    sandbox_id: SandboxId,
    command: Annotated[list[str], typer.Argument(help="A program and its arguments.")],
    *,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time to run.")] = 300.0,
) -> None:
    """Run a command in a sandbox, stream its output, end with its exit code."""
    from cloche.cli import show, standing

    # `--` comes through here, as it stands behind an argument.
    argv = command[1:] if command[0] == "--" else command
    raise typer.Exit(show.run(standing.execute(sandbox_id, argv, timeout)))


@sandbox.command()
def keep(
    sandbox_id: SandboxId,
    *,
    ttl: Annotated[float, typer.Option(metavar="SECONDS", help="How long, from now.")] = 3600,
) -> None:
    """Let a sandbox stand for longer, or for shorter."""
    from cloche.cli import show, standing

    show.run(standing.change(sandbox_id, "keep-alive", {"ttl_s": ttl}))


@sandbox.command()
def pause(sandbox_id: SandboxId) -> None:
    """Stop every process of a sandbox where it stands."""
    from cloche.cli import show, standing

    show.run(standing.change(sandbox_id, "pause", None))


@sandbox.command()
def resume(sandbox_id: SandboxId) -> None:
    """Let a paused sandbox go on."""
    from cloche.cli import show, standing

    show.run(standing.change(sandbox_id, "resume", None))


@sandbox.command()
def delete(sandbox_id: SandboxId) -> None:
    """Destroy a sandbox and all that runs in it."""
    from cloche.cli import show, standing

    show.run(standing.delete(sandbox_id))


@files.command(name="list")
def list_files(target: Target, path: Inside = "/workspace", *, as_json: Json = False) -> None:
    """List a folder."""
    from cloche.cli import show, standing

    show.run(standing.list_files(target, path, as_json=as_json))


@files.command()
def get(
    target: Target,
    path: Inside,
    to: Annotated[
        Path | None, typer.Argument(help="Where to put it; `-` prints it.", allow_dash=True)
    ] = None,
) -> None:
    """Download a file, or a folder as a zip."""
    from cloche.cli import show, standing

    show.run(standing.get(target, path, to))


@files.command()
def put(
    target: Target,
    source: Annotated[Path, typer.Argument(help="A file or folder here.", exists=True)],
    path: Annotated[str | None, typer.Argument(help="Its path in the machine.")] = None,
) -> None:
    """Upload a file, or a folder with all that is in it."""
    from cloche.cli import show, standing

    show.run(standing.put(target, source, path or f"/workspace/{source.resolve().name}"))


@files.command()
def move(target: Target, path: Inside, to: Inside) -> None:
    """Give a file or folder another name."""
    from cloche.cli import show, standing

    show.run(standing.move(target, path, to))


@files.command()
def remove(
    target: Target,
    path: Inside,
    *,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="With all in it.")] = False,
) -> None:
    """Remove a file, or with `--recursive` a folder."""
    from cloche.cli import show, standing

    show.run(standing.remove(target, path, recursive=recursive))
