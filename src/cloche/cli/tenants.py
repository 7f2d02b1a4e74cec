"""`cloche tenants`: who is on a server, and what each may have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer(
    name="tenants",
    help="List tenants, and show or set what each may have.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@app.command(name="list")
def list_(*, as_json: Json = False) -> None:
    """List every tenant with what it uses."""
    from cloche.cli import remote, show

    show.run(remote.list_tenants(as_json=as_json))


@app.command()
def quota(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.")],
    *,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A number; `none` for no limit, or `default`."
        ),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Go back to the server's default first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a tenant may have and what it has; set it with --set.

    cloche tenants quota blue --set jobs=20 --set cpu_s=36000 --set storage_mib=none
    """
    from cloche.cli import remote, show

    wanted = dict(_parse(text) for text in changes or [])
    show.run(remote.quota(tenant, wanted, reset=reset, as_json=as_json))


def _parse(text: str) -> tuple[str, Any]:
    from cloche.core.errors import BadRequest

    name, _, value = text.partition("=")
    if value == "none":
        return name, None
    if value == "default":
        return name, value
    try:
        number = float(value)
        return name, int(number) if number.is_integer() else number
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{text!r} is not NAME=NUMBER.", remedy="Write --set jobs=20, or --set jobs=none."
        ) from None
