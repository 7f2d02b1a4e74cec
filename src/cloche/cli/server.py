"""`cloche serve`: the API, with a worker in the same process or without."""

from __future__ import annotations

from pathlib import Path

from cloche.cli import begin
from cloche.serve import Running
from cloche.serve import serve as run_server


async def serve(host: str, port: int, data: Path | None) -> None:
    """Serve until a signal says to stop."""
    chosen = begin.prepare(data)

    async def tell(running: Running) -> None:
        begin.say(chosen, _banner(running))

    await run_server(chosen, host=host, port=port, on_ready=tell)


def _banner(running: Running) -> list[str]:
    machines = (
        f"giving machines of the {running.rung} rung"
        if running.rung
        else "leaving machines to workers: start them with `cloche worker`"
    )
    lines = [f"Cloche is at {running.url}, {machines}."]
    if running.key_file is not None:
        lines.append(f"The first API key is in {running.key_file}.")
    return lines
