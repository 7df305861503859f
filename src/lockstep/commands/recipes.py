"""List the shipped recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple

import click

_NARROW: Final = 110  # columns of a terminal, below which a table would fold the descriptions


class Row(NamedTuple):
    """One recipe, as the list shows it."""

    name: str
    model: str
    data: str
    batch: str
    length: str
    description: str


@click.command("recipes")
def command() -> None:
    """List the shipped recipes: `lockstep show NAME` prints one, `lockstep train NAME` trains it."""
    from lockstep.config.load import shipped

    rows = [row(name, file) for name, file in shipped().items()]
    if sys.stdout.isatty():
        draw(rows)
    else:
        click.echo("\n".join(_plain([Row("name", "model", "data", "batch", "length", "description"), *rows])))


def row(name: str, file: Path) -> Row:
    from lockstep.config.load import load

    recipe = load(name).config.recipe
    length = f"{recipe.epochs} epochs" if recipe.epochs else f"{recipe.steps} steps"
    return Row(name, recipe.model.name, recipe.data.name, str(recipe.batch), length, _description(file))


def _description(file: Path) -> str:
    """The first comment of a recipe says what it is."""
    with file.open(encoding="utf-8") as lines:
        return next((line.strip("# \n") for line in lines if line.startswith("#")), "")


def _plain(rows: list[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def draw(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Column, Table

    console = Console()
    if console.width < _NARROW:
        for row in rows:
            console.print(row.name, style="bold", highlight=False)
            facts = f"{row.model}, {row.data}, batch {row.batch}, {row.length}"
            console.print(Padding(f"{row.description}\n{facts}", (0, 0, 0, 2)), highlight=False)
        return
    columns = [Column(name, no_wrap=name != "description") for name in Row._fields]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
