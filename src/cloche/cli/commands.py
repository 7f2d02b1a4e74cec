"""Every command of `cloche`, with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloche.cli import image, jobs, sandboxes, tenants

app = typer.Typer(
    name="cloche",
    help="Run coding agents, and the code they write, under glass.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Loading rich for the help alone would double its time.
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(image.app, name="image")
jobs.register(app)
sandboxes.register(app)
app.add_typer(tenants.app, name="tenants")

Vcpus = Annotated[int, typer.Option(help="Processors.")]
Memory = Annotated[int, typer.Option(metavar="MIB", help="Memory.")]
Disk = Annotated[int, typer.Option(metavar="MIB", help="Disk: what may be written in all.")]
Pids = Annotated[int, typer.Option(help="Processes and threads.")]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="A variable.")
]
Cwd = Annotated[str, typer.Option(help="The folder inside the machine to run in.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@app.callback(invoke_without_command=True)
def cloche(
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Run coding agents, and the code they write, under glass."""
    if version:
        from cloche import __version__

        typer.echo(f"cloche {__version__}")
        raise typer.Exit


@app.command(
    name="exec",
    # Everything behind the first word of the command is the command's own.
    context_settings={"allow_interspersed_args": False},
)
def exec_(
    command: Annotated[
        list[str] | None, typer.Argument(help="A program and its arguments, or code.")
    ] = None,
    *,
    python: Annotated[bool, typer.Option("--python", help="The argument is Python.")] = False,
    ts: Annotated[bool, typer.Option("--ts", help="The argument is TypeScript.")] = False,
    js: Annotated[bool, typer.Option("--js", help="The argument is JavaScript.")] = False,
    sh: Annotated[bool, typer.Option("--sh", help="The argument is a bash script.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time to run.")] = 300.0,
    vcpus: Vcpus = 2,
    memory: Memory = 2048,
    disk: Disk = 8192,
    pids: Pids = 1024,
    env: Env = None,
    cwd: Cwd = "/workspace",
    as_json: Json = False,
) -> None:
    """Run one thing in a fresh sandbox, stream its output, end with its exit code.

    cloche exec -- ls -la /

    cloche exec --python 'print(6*7)'

    cloche exec --ts 'enum A { B = 42 }; console.log(A.B)'

    cloche exec --python - < script.py
    """
    from cloche.cli import execute, show
    from cloche.core.spec import SandboxSpec

    chosen = {"python": python, "typescript": ts, "javascript": js, "bash": sh}
    order = execute.Order(
        languages=[name for name, wanted in chosen.items() if wanted],
        command=command or [],
        timeout_s=timeout,
        env=execute.parse_env(env or []),
        cwd=cwd,
        spec=SandboxSpec(vcpus=vcpus, memory_mib=memory, disk_mib=disk, pids=pids),
        as_json=as_json,
    )
    raise typer.Exit(show.run(execute.execute(order)))


@app.command()
def shell(
    *,
    vcpus: Vcpus = 2,
    memory: Memory = 2048,
    disk: Disk = 8192,
    pids: Pids = 1024,
    env: Env = None,
    cwd: Cwd = "/workspace",
) -> None:
    """Open a terminal in a fresh sandbox. It is gone when you leave."""
    from cloche.cli import execute, show, terminal
    from cloche.core.spec import SandboxSpec

    spec = SandboxSpec(vcpus=vcpus, memory_mib=memory, disk_mib=disk, pids=pids)
    raise typer.Exit(show.run(terminal.shell(spec, execute.parse_env(env or []), cwd)))


ListenOn = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(help="The port to listen on; 0 for any.")]
Data = Annotated[Path | None, typer.Option(help="The data folder, in place of CLOCHE_DATA.")]


@app.command()
def up(*, host: ListenOn = "127.0.0.1", port: Port = 8000, data: Data = None) -> None:
    """Run the server, build the machine image first if need be, and say how to go on."""
    from cloche.cli import show
    from cloche.cli import up as command

    show.run(command.up(host, port, data.absolute() if data else None), serving=True)


@app.command(name="open")
def open_(
    *,
    role: Annotated[str | None, typer.Option(help="A lesser role than the key's own.")] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open it in a browser here.")] = False,
) -> None:
    """Print a link that lets one browser in, once, within ten minutes."""
    from cloche.cli import remote, show

    show.run(remote.open_page(role=role, browser=browser))


@app.command()
def serve(*, host: ListenOn = "127.0.0.1", port: Port = 8000, data: Data = None) -> None:
    """Run the server: the API, and a worker in the same process."""
    from cloche.cli import server, show

    show.run(server.serve(host, port, data.absolute() if data else None), serving=True)


@app.command()
def worker(*, data: Data = None) -> None:
    """Run a worker without an API: it takes jobs from the store that servers share with it."""
    from cloche.cli import show
    from cloche.cli import worker as command

    show.run(command.worker(data.absolute() if data else None), serving=True)


@app.command()
def doctor(*, as_json: Json = False) -> None:
    """Show each rung of the isolation ladder: available, or why not and how to get it."""
    from cloche.cli import doctor as command
    from cloche.cli import show

    raise typer.Exit(show.run(command.doctor(as_json=as_json)))


@app.command()
def sweep(*, as_json: Json = False) -> None:
    """Remove what killed processes left behind. Every start does this by itself."""
    from cloche.app import Host
    from cloche.cli import show

    swept = show.run(Host.from_settings().backend.sweep())
    if as_json:
        show.print_json({"swept": swept})
    else:
        typer.echo(f"Swept {len(swept)} machines." if swept else "Nothing to sweep.")


@app.command()
def gc(*, as_json: Json = False) -> None:
    """Forget jobs and uploads that are past their time. A server does this by itself."""
    from cloche.cli import gc as command
    from cloche.cli import show

    show.run(command.gc(as_json=as_json))
