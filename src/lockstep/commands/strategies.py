"""List the strategies, what each of them splits, its requirements, and its communication."""

import sys
from typing import NamedTuple

import click


class StrategyRow(NamedTuple):
    """A row of the list of strategies."""

    name: str
    cuts: str
    exactness: str
    needs: str
    communication: str


@click.command("strategies")
def command() -> None:
    """List the strategies of `placement.strategy`.

    Exactness `bits` promises the same bits as one process, `close` promises a difference within a computed tolerance,
    and `none` promises neither.
    """
    from lockstep.strategies import list_strategy_names

    rows = [make_row(name) for name in list_strategy_names()]
    if sys.stdout.isatty():
        print_table(rows)
    else:
        click.echo("\n\n".join(_format_row(strategy) for strategy in rows))


def make_row(name: str) -> StrategyRow:
    """Return the row of a built-in strategy in the list."""
    from importlib import import_module

    traits = import_module(f"lockstep.strategies.{name}").Strategy().traits
    return StrategyRow(name, traits.cuts, traits.exactness, traits.needs, traits.communication)


def _format_row(row: StrategyRow) -> str:
    lines = [f"  {label + ':':<14} {text}" for label, text in zip(row._fields[1:], row[1:], strict=True)]
    return "\n".join([row.name, *lines])


def print_table(rows: list[StrategyRow]) -> None:
    """Print the strategies as a table on the terminal."""
    from rich.console import Console
    from rich.table import Column, Table

    columns = [Column(name, no_wrap=name in ("name", "exactness")) for name in StrategyRow._fields]
    table = Table(*columns, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
