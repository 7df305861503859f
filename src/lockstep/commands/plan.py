"""Measure what each placement of a recipe would take, before any of them runs."""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from lockstep.commands import _completion, _recipe
from lockstep.common.text import printable, step_time
from lockstep.errors import EXIT_FAILED, UsageError, os_error_as
from lockstep.launchers import check_alone

_WIDEST: Final = 200  # characters of a line that is not for a terminal
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)([Bb])")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def quantity(text: str, option: str, example: str) -> int | None:
    """Return a number of bytes: `80GB`, `24GiB`, or of bits, `400Gb`, an eighth; None where there is no text."""
    if not text:
        return None
    found = _QUANTITY.fullmatch(text)
    if not found or not float(found[1]):
        raise UsageError(f"{option}: expected a number and its unit, such as {example}, got {text}")
    number, prefix, binary, unit = found.groups()
    bytes_or_bits: int = (1024 if binary else 1000) ** _POWERS[prefix]
    return math.ceil(float(number) * bytes_or_bits / (8 if unit == "b" else 1))


def duration(text: str, option: str, example: str) -> float | None:
    """Return seconds: `90s`, `15m`, `3h`, `2d`; None where there is no text."""
    if not text:
        return None
    found = _DURATION.fullmatch(text)
    if not found or not float(found[1]):
        raise UsageError(f"{option}: expected a number and its unit, s, m, h or d, such as {example}, got {text}")
    return float(found[1]) * _SECONDS[found[2]]


def check_writable(source: str, overrides: Sequence[str]) -> None:
    """Raise UsageError where the best placement of what is measured could not be put into a file."""
    from lockstep.config.shipped import list_shipped_recipes

    if source in list_shipped_recipes():
        raise UsageError(
            f"--write: {source} is a recipe that comes with Lockstep, and no file of yours; "
            f"lockstep show {source} > mine.yaml makes one"
        )
    if overrides:
        raise UsageError(f"--write: the file is measured as it stands; put {' '.join(overrides)} into it first")
    if Path(source).exists() and not os.access(source, os.W_OK):
        raise UsageError(f"--write: {source} cannot be written to")


def write_back(file: Path, strategy: Any, predicted: Mapping[str, Any]) -> None:
    """Put a placement into a file, which stays whole, with its mode and whatever else stands in it."""
    from lockstep.config.edit import with_values
    from lockstep.training.checkpoint import durable

    file = file.resolve()  # a link stays one
    mode = file.stat().st_mode
    with os_error_as(UsageError, f"--write: {file} cannot be written to"):
        text = with_values(
            file.read_bytes().decode(),
            str(file),
            {
                ("placement", "strategy"): strategy,
                ("placement", "processes"): predicted["processes"],
                ("run", "predicted"): dict(predicted),
            },
        )
        durable.replace(file, text.encode())
        file.chmod(mode)


@click.command("plan")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_completion.words)
@click.option("--placements", default="", help="Strategies, such as ddp,zero3; left out, all that promise the bits.")
@click.option("--processes", default="1,2,4", show_default=True, help="Numbers of processes, such as 1,8,64.")
@click.option("--memory", default="", metavar="SIZE", help="Of a device, such as 80GB: which placements fit.")
@click.option("--link", default="", metavar="SPEED", help="Elsewhere: what a rank can send, such as 400Gb/s.")
@click.option("--price", type=float, help="Of a device and hour: what an epoch and the run cost.")
@click.option("--mtbf", default="", metavar="TIME", help="Between failures of the run, such as 3h: how often to save.")
@click.option("--save", default="", metavar="TIME", help="With --mtbf: what a save takes; left out, it is measured.")
@click.option("--write", "writes", is_flag=True, help="Put the best into the file RECIPE, whose comments stay.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all that was found to this file."
)
def command(
    words: tuple[str, ...],
    placements: str,
    processes: str,
    memory: str,
    link: str,
    price: float | None,
    mtbf: str,
    save: str,
    file: Path | None,
    writes: bool,
) -> None:
    """Measure memory, time and traffic of a rank of RECIPE under each placement, and name the best.

    A rank does a few steps on this machine, with the recipe's model, data and engine, and the other ranks are
    pretended: so 64 of them want no more than one. Without --link the placements are for this machine, and all ranks
    are run, up to 8 and if they have room. RECIPE is a YAML file or the name of a shipped recipe (digits, if left
    out).
    """
    from rich.console import Console

    from lockstep.comparison.plan import placements_in, processes_in
    from lockstep.config.base import values
    from lockstep.config.blame import with_places
    from lockstep.config.document import parse
    from lockstep.config.load import load, split
    from lockstep.config.write import flow
    from lockstep.planning.costs import Terms, costs
    from lockstep.planning.survey import Machine, as_predicted, made_ready, save_seconds, survey
    from lockstep.planning.table import best, draw, in_order, refused, to_json

    check_alone("plan starts what it measures")
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--json {file}: there is no folder {file.parent}; make it, or choose another")
    speed = quantity(link.removesuffix("/s") or link, "--link", "400Gb/s")
    machine = Machine(quantity(memory, "--memory", "80GB"), speed)
    if save and not mtbf:
        raise UsageError("--save: it goes with --mtbf, for which it is measured otherwise")
    if price is not None and not 0 < price < math.inf:
        raise UsageError(f"--price: expected a number above 0, such as 2.50, got {price:g}")
    terms = Terms(price, duration(mtbf, "--mtbf", "3h"), duration(save, "--save", "20s") or 0.0)
    counts, (source, overrides) = processes_in(processes), split(words)
    if writes:
        check_writable(source, overrides)
    listed = [f"placement.strategy={flow(each)}" for each in (placements_in(placements) if placements else ())]
    strategies = [load(source, [*overrides, each]).config.placement.strategy for each in listed]
    loaded = load(source, overrides)
    _recipe.tell_notes(loaded)
    with with_places(loaded):
        ready = made_ready(loaded)
        rows = survey(loaded, ready, strategies, counts, machine, _recipe.tell_measuring)
        if mtbf and not save:
            terms = replace(terms, save_s=save_seconds(loaded, ready))
    rows = [
        row if row.seconds is None else replace(row, costs=costs(row.seconds, row.processes, ready.steps, terms))
        for row in in_order(rows, machine)
    ]
    Console(width=None if sys.stdout.isatty() else _WIDEST).print(draw(rows, machine))
    if mtbf:
        click.echo(f"a save takes {step_time(terms.save_s)}{'' if save else ', as one process does it'}")
    for line in refused(rows):
        click.echo(line)
    if file is not None:
        file.write_text(to_json(rows, machine), encoding="utf-8")
    if all(row.figures is None for row in rows):
        raise UsageError("nothing could be measured, for the reasons above")
    if (chosen := best(rows, machine)) is None:
        click.echo("none fits; more processes, zero3, offload or recompute take less of each")
        raise SystemExit(EXIT_FAILED)
    click.echo(printable(f"best: {chosen.words}"))
    if writes:
        write_back(Path(source), parse(chosen.strategy, source).values, values(as_predicted(chosen)))
        click.echo(printable(f"written to {source}"))
