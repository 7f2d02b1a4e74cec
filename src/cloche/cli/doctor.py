"""`cloche doctor`: what this host can give, proven by running it."""

from __future__ import annotations

import platform
from dataclasses import asdict

from cloche.app import Host
from cloche.cli.show import EXIT_CLOCHE, print_json
from cloche.sandbox.ladder import Probe


async def doctor(*, as_json: bool) -> int:
    """Probe every rung and print what came of it; 0 when at least one works."""
    host = Host.from_settings()
    try:
        probes = await host.probe()
    finally:
        host.backend.close()
    if as_json:
        print_json({"kernel": platform.release(), "rungs": [asdict(probe) for probe in probes]})
    else:
        _print_table(probes)
    return 0 if any(probe.available for probe in probes) else EXIT_CLOCHE


def _print_table(probes: list[Probe]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="The isolation ladder, strongest first", title_justify="left")
    table.add_column("rung", style="bold")
    table.add_column("here")
    table.add_column("start", justify="right")
    table.add_column("what was found")
    for probe in probes:
        found = escape(probe.detail)
        if probe.remedy:
            found += f"\n[cyan]try:[/] {escape(probe.remedy)}"
        table.add_row(
            probe.rung.value,
            "[green]yes[/]" if probe.available else "[red]no[/]",
            f"{probe.start_ms:.0f} ms" if probe.start_ms is not None else "",
            found,
        )
    Console(highlight=False).print(table)
