"""Report what Lockstep finds here: the launcher that started it, the cards, and which data is damaged."""

from __future__ import annotations

import json
import os

import click

from lockstep.core.text import printable, printable_line
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREFLIGHT, EXIT_USAGE


@click.group("doctor")
def command() -> None:
    """Report what Lockstep finds here."""


@command.command("launch")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rendezvous", default="env://", show_default=True, help="As placement.rendezvous would say.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="As placement.device.")
def launch(as_json: bool, rendezvous: str, device: str) -> None:
    """Report which launcher started this process, and why: its rank, its device, and where rank 0 would listen.

    Run it as you would run `lockstep train`: srun -N2 -n4 lockstep doctor launch
    """
    from lockstep.run import launch_report

    found = launch_report.found_at_launch(os.environ, rendezvous, device)
    click.echo(json.dumps(found) if as_json else launch_report.in_words(found))  # at once: ranks share the terminal
    raise SystemExit(EXIT_USAGE if found["problems"] else 0)


@command.command("data")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
def data(words: tuple[str, ...]) -> None:
    """Read every sample of RECIPE's data once, on all cores, and name those that cannot be read.

    A file that is cut off, or of another kind, is found. A bit that flipped inside a file mostly decodes without an
    error: against that only hashes help, taken when the files were known to be good.
    """
    from lockstep.config.load import load, split
    from lockstep.run.data_report import read_all

    damaged, total = read_all(
        load(*split(words)).config.recipe,
        lambda damage: click.echo(printable_line(damage)),
        lambda progress: click.echo(progress, err=True),
    )
    click.echo(f"{damaged:,} of {total:,} samples cannot be read")
    raise SystemExit(EXIT_FAILED if damaged else EXIT_DONE)


@command.command("gpu")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--measure/--no-measure", default=True, help="Measure how fast bytes are copied, for 5 s at most.")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
def gpu(as_json: bool, measure: bool, words: tuple[str, ...]) -> None:
    """Report which cards and libraries are here, what is wrong with them, and which settings make kernels exact.

    With RECIPE it also lists what of its model and loss has no exact kernel on CUDA, and ends with exit code 2 where
    that is anything; it needs no card for that. Where no card can be used it explains why, and ends with exit code 4.
    """
    from lockstep.config.load import load, split
    from lockstep.run import gpu_report

    recipe = load(*split(words)).config.recipe if words else None
    found = gpu_report.found(recipe, measure)
    click.echo(json.dumps(found) if as_json else printable("\n".join(gpu_report.lines(found))))
    raise SystemExit(EXIT_USAGE if found["refused"] else EXIT_PREFLIGHT if found["problems"] else EXIT_DONE)
