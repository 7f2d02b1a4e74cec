"""`cloche image`: the file system machines start from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cloche.core.image import Image
    from cloche.sandbox.images import Images, Listed, Progress

app = typer.Typer(
    name="image",
    help="Build, list and remove the file system machines start from.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@app.command()
def build(
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Build anew, even if the image is there.")
    ] = False,
    apt_sources: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="An apt sources file to build from, in place of this host's own mirrors.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build the machine image, unless it is there. Needs root and a few minutes."""
    from cloche.cli import show
    from cloche.settings import load

    settings = load()
    images = _images()

    async def run() -> Image:
        with reporting() as report:
            return await images.build(
                progress=report, force=force, apt_sources=apt_sources or settings.apt_sources
            )

    image = show.run(run())
    if as_json:
        show.print_json(
            {
                "name": image.name,
                "digest": image.digest,
                "layers": [str(layer) for layer in image.layers],
            }
        )
    else:
        typer.echo(f"The image {image.name} ({image.digest[:16]}) is at {image.layers[-1].parent}")


@app.command(name="list")
def list_(*, as_json: Json = False) -> None:
    """List the images on this host."""
    from cloche.cli import show

    images = _images().list()
    if as_json:
        show.print_json([_as_json(image) for image in images])
    else:
        _print_table(images)


@app.command()
def path() -> None:
    """Print the folder of the image machines start from."""
    typer.echo(_images().find().layers[-1])


@app.command()
def remove(
    digest: Annotated[str, typer.Argument(help="Its digest, or the beginning of it.")],
) -> None:
    """Remove an image that no machine runs on."""
    from cloche.cli import show

    typer.echo(f"Removed {show.run(_images().remove(digest))}.")


@app.command()
def prune() -> None:
    """Remove what other versions of Cloche built, unless machines run on it."""
    from cloche.cli import show

    removed = show.run(_images().prune())
    typer.echo("\n".join(f"Removed {name}." for name in removed) or "Nothing to remove.")


def _images() -> Images:
    from cloche.app import Host

    return Host.from_settings().images


def _as_json(image: Listed) -> dict[str, object]:
    from dataclasses import asdict

    return {**asdict(image.record), "folder": str(image.folder), "current": image.current}


def _print_table(images: tuple[Listed, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("image", "digest", "made of", "size", "built", "current"):
        table.add_column(title, justify="right" if title == "size" else "left", no_wrap=True)
    for image in images:
        record = image.record
        table.add_row(
            record.name,
            record.digest[:16],
            f"{record.suite} {record.architecture}",
            f"{record.size_bytes / 1e9:.2f} GB",
            record.built_at[:16].replace("T", " "),
            "yes" if image.current else "",
        )
    Console(highlight=False).print(table)


@contextlib.contextmanager
def reporting() -> Iterator[Callable[[Progress], None]]:
    """Show progress on the error stream: a bar in a terminal, a line a step elsewhere."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda progress: bar.update(
            task, completed=progress.fraction, description=progress.step
        )


def _lines() -> Callable[[Progress], None]:
    last = ""

    def report(progress: Progress) -> None:
        nonlocal last
        if progress.step != last:
            last = progress.step
            typer.echo(f"{progress.fraction:4.0%} {progress.step}", err=True)

    return report
