"""List the shipped recipes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import click

if TYPE_CHECKING:
    from lockstep.config.shipped import ShippedRecipe

_MIN_TABLE_WIDTH: Final = 110  # on a narrower terminal, a table would wrap the descriptions


class RecipeRow(NamedTuple):
    """A row of the list of recipes."""

    name: str
    model: str
    data: str
    batch: str
    length: str
    description: str


@click.command("recipes")
def command() -> None:
    """List the shipped recipes. `lockstep show NAME` prints a recipe, and `lockstep train NAME` trains it."""
    from lockstep.config.shipped import list_shipped_recipes

    rows = [make_row(shipped) for shipped in list_shipped_recipes().values()]
    if sys.stdout.isatty():
        print_table(rows)
    else:
        lines = [RecipeRow(*RecipeRow._fields), *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        click.echo("\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines))


def make_row(shipped: ShippedRecipe) -> RecipeRow:
    from lockstep.config.load import load
    from lockstep.core.epochs import format_epochs

    recipe = load(shipped.name).config.recipe
    length = format_epochs(recipe.epochs) if recipe.epochs else f"{recipe.steps} steps"
    return RecipeRow(shipped.name, recipe.model.name, recipe.data.name, str(recipe.batch), length, shipped.description)


def print_table(rows: list[RecipeRow]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Column, Table

    console = Console()
    if console.width < _MIN_TABLE_WIDTH:
        for row in rows:
            console.print(row.name, style="bold", highlight=False)
            details = f"{row.model}, {row.data}, batch {row.batch}, {row.length}"
            console.print(Padding(f"{row.description}\n{details}", (0, 0, 0, 2)), highlight=False)
        return
    columns = [Column(name, no_wrap=name != "description") for name in RecipeRow._fields]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
