"""Check up the machine and the ranks; or report the launcher, the cards, and which data is damaged."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from click.core import ParameterSource

from lockstep.common.text import printable, printable_line
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREFLIGHT, EXIT_USAGE, UsageError
from lockstep.launchers.job import PORT

if TYPE_CHECKING:
    from lockstep.checkup.report import Report

_WIDTH = 120  # of what is printed where that is no terminal


@click.group("doctor", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--processes", type=click.IntRange(1), help="Start so many on this host; a launcher starts them elsewhere."
)
@click.option("--dir", "folder", type=click.Path(path_type=Path), default="runs", show_default=True, help="As run.dir.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="As placement.device.")
@click.option("--rendezvous", default="env://", show_default=True, help="As placement.rendezvous.")
@click.option(
    "--timeout", type=click.IntRange(1), default=30, show_default=True, help="Seconds to wait for another rank."
)
@click.pass_context
def command(
    context: click.Context,
    as_json: bool,
    processes: int | None,
    folder: Path,
    device: Literal["auto", "cpu", "cuda"],
    rendezvous: str,
    timeout: int,
) -> None:
    """Check up this machine and, under a launcher, the ranks and what lies between them, in at most a minute.

    Each finding is ok, a warning or a problem: what was found, what it leads to, what to do. Ends with exit code 4
    where there is a problem.

    lockstep launch --on slurm --nodes 2 --processes-per-node 4 -- doctor
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            what = context.invoked_subcommand
            raise UsageError(f"doctor: options of the check-up before {what}; write them after {what}, if it has them")
        return
    from lockstep.checkup.rank import Asked
    from lockstep.run.checked_up import check_up

    asked = Asked(folder, PORT, device)
    raise SystemExit(check_up(asked, partial(_show, as_json), processes, rendezvous, timeout))


def _show(as_json: bool, report: Report) -> None:
    from rich.console import Console

    from lockstep.checkup.report import tables

    if as_json:
        click.echo(json.dumps(report.as_json()))
        return
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for each in tables(report):
            console.print(each)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))  # at once: ranks share the terminal


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
