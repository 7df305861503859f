"""Say what Lockstep finds here: the launcher that started it, the cards, and which data is damaged."""

from __future__ import annotations

import json
import os
from itertools import chain
from typing import TYPE_CHECKING

import click

from lockstep.core.text import printable, printable_line
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREFLIGHT, EXIT_USAGE
from lockstep.platforms import usable_cores

if TYPE_CHECKING:
    from lockstep.config.recipe import Recipe


@click.group("doctor")
def command() -> None:
    """Say what Lockstep finds here."""


@command.command("launch")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rendezvous", default="env://", show_default=True, help="As placement.rendezvous would say.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="As placement.device.")
def launch(as_json: bool, rendezvous: str, device: str) -> None:
    """Say which launcher started this process, and why: its rank, its device, and where rank 0 would listen.

    Run it as you would run `lockstep train`: srun -N2 -n4 lockstep doctor launch
    """
    from lockstep.run import launch_report

    found = launch_report.found_at_launch(os.environ, rendezvous, device)
    click.echo(json.dumps(found) if as_json else launch_report.told(found))  # at once: ranks share the terminal
    raise SystemExit(EXIT_USAGE if found["problems"] else 0)


@command.command("data")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
def data(words: tuple[str, ...]) -> None:
    """Read every sample of RECIPE's data once, on all cores, and name those that cannot be read.

    A file that is cut off, or of another kind, is found. A bit that flipped inside a file mostly decodes without an
    error: against that only hashes help, taken when the files were known to be good.
    """
    from lockstep.config.load import load, split

    raise SystemExit(_read_all(load(*split(words)).config.recipe))


@command.command("gpu")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--measure/--no-measure", default=True, help="Measure how fast bytes are copied, for 5 s at most.")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
def gpu(as_json: bool, measure: bool, words: tuple[str, ...]) -> None:
    """Say which cards and libraries are here, what is wrong with them, and which settings make kernels exact.

    With RECIPE it says too what of its model and loss has no exact kernel on CUDA, and ends with exit code 2 where that
    is anything; it needs no card for that. Where no card can be used it says why, and ends with exit code 4.
    """
    from lockstep.config.load import load, split
    from lockstep.run import gpu_report

    recipe = load(*split(words)).config.recipe if words else None
    found = gpu_report.found(recipe, measure)
    click.echo(json.dumps(found) if as_json else printable("\n".join(gpu_report.told(found))))
    raise SystemExit(EXIT_USAGE if found["refused"] else EXIT_PREFLIGHT if found["problems"] else EXIT_DONE)


def _read_all(recipe: Recipe) -> int:
    """Read both parts, report what is damaged and the progress, and return the exit code."""
    from lockstep.data.loader import damages
    from lockstep.run.build import open_recipe_data

    strict = recipe.data.model_copy(update={"on_error": "raise"})
    found = open_recipe_data(recipe.model_copy(update={"data": strict}))
    parts = [split for split in (found.train, found.validation) if split is not None]
    total, workers = sum(map(len, parts)), usable_cores()
    damaged, reported = 0, 0
    for number, damage in enumerate(chain(*(damages(split, workers) for split in parts)), 1):
        if damage:
            damaged += 1
            click.echo(printable_line(damage))
        if number * 10 // total > reported:
            reported = number * 10 // total
            click.echo(f"{number:,} of {total:,} samples read", err=True)
    click.echo(f"{damaged:,} of {total:,} samples cannot be read")
    return EXIT_FAILED if damaged else EXIT_DONE
