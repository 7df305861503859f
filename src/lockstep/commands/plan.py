"""Measure what each placement of a recipe would take, before any of them runs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

import click

from lockstep.commands import _completion, _recipe
from lockstep.common.text import printable
from lockstep.errors import EXIT_FAILED, UsageError
from lockstep.launchers import detect

_WIDEST: Final = 200  # characters of a line that is not for a terminal
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)([Bb])")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def quantity(text: str, option: str, example: str) -> float:
    """Return a number of bytes: `80GB`, `24GiB`, or of bits, `400Gb`, an eighth of that."""
    found = _QUANTITY.fullmatch(text)
    if not found or not float(found[1]):
        raise UsageError(f"{option}: expected a number and its unit, such as {example}, got {text}")
    number, prefix, binary, unit = found.groups()
    bytes_or_bits: int = (1024 if binary else 1000) ** _POWERS[prefix]
    return float(number) * bytes_or_bits / (8 if unit == "b" else 1)


@click.command("plan")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_completion.words)
@click.option("--placements", default="", help="Strategies, such as ddp,zero3; left out, all that promise the bits.")
@click.option("--processes", default="1,2,4", show_default=True, help="Numbers of processes, such as 1,8,64.")
@click.option("--memory", default="", metavar="SIZE", help="Of a device, such as 80GB: which placements fit.")
@click.option("--link", default="", metavar="SPEED", help="What a rank can send, such as 400Gb/s; left out, 1GB/s.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all that was found to this file."
)
def command(words: tuple[str, ...], placements: str, processes: str, memory: str, link: str, file: Path | None) -> None:
    """Measure memory, time and traffic of a rank of RECIPE under each placement, and name the best.

    A rank does a few steps on this machine, with the recipe's model, data and engine, and the other ranks are
    pretended: so 64 of them want no more than one. RECIPE is a YAML file or the name of a shipped recipe (digits, if
    left out).
    """
    from rich.console import Console

    from lockstep.comparison.plan import placements_in, processes_in
    from lockstep.config.blame import with_places
    from lockstep.config.load import load, split
    from lockstep.config.write import flow
    from lockstep.planning.survey import Machine, survey
    from lockstep.planning.table import best, draw, in_order, refused, to_json

    if detect(os.environ):
        raise UsageError("plan starts what it measures itself; run it once, without a launcher")
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--json {file}: there is no folder {file.parent}; make it, or choose another")
    machine = Machine(
        int(quantity(memory, "--memory", "80GB")) if memory else None,
        quantity(link.removesuffix("/s"), "--link", "400Gb/s") if link else None,
    )
    counts, (source, overrides) = processes_in(processes), split(words)
    listed = [f"placement.strategy={flow(each)}" for each in (placements_in(placements) if placements else ())]
    strategies = [load(source, [*overrides, each]).config.placement.strategy for each in listed]
    loaded = load(source, overrides)
    _recipe.tell_notes(loaded)
    shown = sys.stderr.isatty()
    with with_places(loaded):
        rows = survey(
            loaded, strategies, counts, machine, lambda text: click.echo(f"... {text}", err=True) if shown else None
        )
    rows = in_order(rows, machine)
    Console(width=None if sys.stdout.isatty() else _WIDEST).print(draw(rows, machine))
    for line in refused(rows):
        click.echo(line)
    if file is not None:
        file.write_text(to_json(rows, machine), encoding="utf-8")
    if all(row.figures is None for row in rows):
        raise UsageError("nothing could be measured, for the reasons above")
    if not (chosen := best(rows, machine)):
        click.echo("none fits; more processes, zero3, offload or recompute take less of each")
        raise SystemExit(EXIT_FAILED)
    click.echo(printable(f"best: {chosen}"))
