"""Train one recipe under several placements, and compare time, memory and bits.

Exit code 0 if all ran and those that promise the same bits have them, 1 if one failed, 3 if one broke its promise.
"""

import shlex
import signal
import sys
from pathlib import Path

import click

from lockstep.commands import _completion
from lockstep.common.text import printable
from lockstep.launchers import check_alone


@click.command("compare")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_completion.words)
@click.option("--placements", default="ddp", show_default=True, help="Strategies, such as ddp,zero3,pipeline.")
@click.option("--processes", default="1,2", show_default=True, help="Numbers of processes, such as 1,2,4.")
@click.option("--also", multiple=True, metavar="KEY=VALUE", help="The recipe with this override too; may be repeated.")
@click.option("--usual", is_flag=True, hidden=True, help="A benchmark now.")
@click.option("--dir", "folder", type=click.Path(file_okay=False, path_type=Path), help="Where the runs and pages go.")
@click.option("--no-page", is_flag=True, help="Write no page.")
@click.option("--png", is_flag=True, help="Write each chart as a PNG file, too, which needs Chromium.")
def command(
    words: tuple[str, ...],
    placements: str,
    processes: str,
    also: tuple[str, ...],
    usual: bool,
    folder: Path | None,
    no_page: bool,
    png: bool,
) -> None:
    """Train RECIPE, a YAML file or the name of a shipped recipe (digits, if left out), under each placement.

    First on one process, with which the others are compared. In --dir lie the runs, comparison.json and
    comparison.html; started again with the same --dir, finished runs are not run again, and others resume.

    A sweep of learning rates, a row each: lockstep compare my.yaml --processes 1 --also recipe.optimizer.lr=0.05 --also
    recipe.optimizer.lr=0.2
    """
    from lockstep.comparison.drive import run_all
    from lockstep.comparison.output import Display, write
    from lockstep.comparison.plan import (
        USUAL_MOVED,
        ComparisonRequest,
        folder_for,
        placements_in,
        plan_runs,
        processes_in,
    )
    from lockstep.config.load import split
    from lockstep.config.shipped import list_shipped_recipes
    from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_VERIFICATION, UsageError
    from lockstep.reporting.png import check_png

    check_alone("compare starts the processes of each placement")
    if usual:
        raise UsageError(f"--usual: {USUAL_MOVED}")
    source, overrides = split(words)
    if source not in list_shipped_recipes() and Path(source).is_dir():
        folders = shlex.join(each for each in words if Path(each).is_dir())
        raise UsageError(f"{source}: a folder; to compare runs, use lockstep report {folders}; else give a YAML file")
    folder = folder or folder_for(source)
    strategies, counts = placements_in(placements), processes_in(processes)
    request = ComparisonRequest(source, tuple(overrides), strategies, counts, also, folder)
    if png:
        check_png()
    plans = plan_runs(request)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the run is saved, no process is left
    try:
        with Display(sys.stderr) as display:
            comparison = run_all(plans, display.show)
    except KeyboardInterrupt:
        click.echo(printable(f"start again with --dir {folder} to resume"), err=True)
        raise
    for path in write(comparison, folder, sys.stdout, with_page=not no_page, with_png=png):
        click.echo(printable(f"written {path}"))
    raise SystemExit(EXIT_FAILED if comparison.failed else EXIT_VERIFICATION if comparison.broken else EXIT_DONE)
