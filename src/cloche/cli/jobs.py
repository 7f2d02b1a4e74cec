"""The commands that talk to a server, with their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

keys = typer.Typer(
    name="keys", help="Make, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None
)
webhooks = typer.Typer(
    name="webhooks",
    help="What webhooks are signed with.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
JobId = Annotated[str, typer.Argument(help="The job's id.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (run, jobs, status, logs, cancel, download):
        app.command()(command)
    app.add_typer(keys, name="keys")
    app.add_typer(webhooks, name="webhooks")


def run(
    what: Annotated[str, typer.Argument(help="A task in words, or code with a language option.")],
    *,
    python: Annotated[bool, typer.Option("--python", help="It is Python.")] = False,
    ts: Annotated[bool, typer.Option("--ts", help="It is TypeScript.")] = False,
    js: Annotated[bool, typer.Option("--js", help="It is JavaScript.")] = False,
    sh: Annotated[bool, typer.Option("--sh", help="It is a bash script.")] = False,
    download_to: Annotated[
        Path | None, typer.Option("--download", metavar="ZIP", help="Where to put the artifacts.")
    ] = None,
) -> None:
    """Submit a job to the server, follow it live, end as it ends."""
    from cloche.cli import remote, show
    from cloche.core.errors import BadRequest

    chosen = {"python": python, "typescript": ts, "javascript": js, "shell": sh}
    kinds = [name for name, wanted in chosen.items() if wanted]
    if len(kinds) > 1:
        raise BadRequest(f"{' and '.join(kinds)} cannot be run at once.", remedy="Choose one.")
    request: dict[str, Any] = {"kind": kinds[0], "code": what} if kinds else {"task": what}
    raise typer.Exit(show.run(remote.run(request, download_to)))


def jobs(
    *,
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(help="How many, at most 200.")] = 20,
    as_json: Json = False,
) -> None:
    """List the server's jobs, newest first."""
    from cloche.cli import remote, show

    show.run(remote.list_jobs(states=state or [], limit=limit, as_json=as_json))


def status(job_id: JobId, *, as_json: Json = False) -> None:
    """Tell how a job is doing."""
    from cloche.cli import remote, show

    show.run(remote.status(job_id, as_json=as_json))


def logs(
    job_id: JobId,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False,
) -> None:
    """Print what a job has written, from its first byte."""
    from cloche.cli import remote, show

    show.run(remote.logs(job_id, follow=follow))


def cancel(job_id: JobId) -> None:
    """End a job: kill its processes and destroy its machine."""
    from cloche.cli import remote, show

    show.run(remote.cancel(job_id))


def download(
    job_id: JobId,
    *,
    to: Annotated[Path | None, typer.Option(metavar="ZIP", help="Where to put it.")] = None,
) -> None:
    """Download what a job left behind, as a zip."""
    from cloche.cli import remote, show

    show.run(remote.download(job_id, to or Path(f"{job_id}.zip")))


@keys.command()
def create(
    *,
    tenant: Annotated[str, typer.Option(help="Whose key it is.")] = "default",
    role: Annotated[str, typer.Option(help="admin, member or read-only.")] = "member",
    name: Annotated[str, typer.Option(help="A note on what it is for.")] = "",
) -> None:
    """Make a key. It is printed this once."""
    from cloche.cli import remote, show

    show.run(remote.create_key(tenant=tenant, role=role, name=name))


@keys.command(name="list")
def list_(*, as_json: Json = False) -> None:
    """List the keys."""
    from cloche.cli import remote, show

    show.run(remote.list_keys(as_json=as_json))


@keys.command()
def revoke(key_id: Annotated[str, typer.Argument(help="The key's id.")]) -> None:
    """Make a key useless from now on."""
    from cloche.cli import remote, show

    show.run(remote.revoke_key(key_id))


@webhooks.command()
def secret() -> None:
    """Print what the server signs webhooks with; for admins."""
    from cloche.cli import remote, show

    show.run(remote.webhook_secret())
