"""Train a recipe under several placements, and compare time, memory and bits.

Exits with code 0 if all runs succeed, with code 1 if a run fails, and with code 3 if a run has different weights than
the run on one process although its strategy promises the same bits.
"""

import shlex
import signal
import sys
from pathlib import Path

import click

from lockstep.commands import _completion, _recipe
from lockstep.common.location import reject_url
from lockstep.common.text import printable
from lockstep.launchers import check_no_launcher
from lockstep.ranks.signals import EarlyStop


@click.command("compare")
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_completion.complete_arguments)
@click.option("--placements", default="ddp", show_default=True, help="Strategies, such as ddp,zero3,pipeline.")
@click.option("--processes", default="1,2", show_default=True, help="Numbers of processes, such as 1,2,4.")
@click.option("--also", multiple=True, metavar="KEY=VALUE", help="Also train with this override. Can be repeated.")
@click.option("--usual", is_flag=True, hidden=True, help="Moved to a benchmark.")
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False, path_type=Path), help="Folder for the runs and the page."
)
@click.option("--no-page", is_flag=True, help="Don't write a page.")
@click.option("--png", is_flag=True, help="Also write each chart as a PNG file. Requires Chromium.")
def command(
    arguments: tuple[str, ...],
    placements: str,
    processes: str,
    also: tuple[str, ...],
    usual: bool,
    folder: Path | None,
    no_page: bool,
    png: bool,
) -> None:
    """Train RECIPE under each placement. RECIPE is a YAML file or the name of a shipped recipe, and defaults to digits.

    The recipe runs on one process first, and all other runs are compared with that run. The folder --dir contains the
    runs, comparison.json and comparison.html. If you start again with the same --dir, finished runs are skipped and
    unfinished runs resume.

    To sweep learning rates, with a row for each: lockstep compare my.yaml --processes 1 --also
    recipe.optimizer.lr=0.05 --also recipe.optimizer.lr=0.2. The first row is RECIPE itself, here with its own learning
    rate, so you don't need an --also for it.
    """
    from lockstep.config.load import split_arguments
    from lockstep.config.shipped import list_shipped_recipes
    from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_VERIFICATION, UsageError

    reject_url(folder, "compare --dir")
    check_no_launcher("compare starts the processes of each placement")
    source, overrides = split_arguments(arguments)
    if source not in list_shipped_recipes() and Path(source).is_dir():
        folders = shlex.join(argument for argument in arguments if Path(argument).is_dir())
        raise UsageError(
            f"{source}: expected a YAML file or the name of a recipe, got a folder; to compare runs, use lockstep "
            f"report {folders}"
        )
    with EarlyStop():
        _recipe.print_preparing(source, "loading libraries, and checking each placement before the first run", err=True)
        from lockstep.comparison.drive import run_all
        from lockstep.comparison.output import Display, write_results
        from lockstep.comparison.plan import (
            USUAL_MOVED,
            ComparisonRequest,
            make_comparison_path,
            parse_placements,
            parse_processes,
            plan_runs,
        )
        from lockstep.reporting.png import check_png

        if usual:
            raise UsageError(f"--usual: {USUAL_MOVED}")
        folder = folder or make_comparison_path(source)
        strategies, counts = parse_placements(placements), parse_processes(processes)
        request = ComparisonRequest(source, tuple(overrides), strategies, counts, also, folder)
        if png:
            check_png()
        plans = plan_runs(request)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as on Ctrl-C, save the run and end all processes
    try:
        with Display(sys.stderr) as display:
            comparison = run_all(plans, display.show)
    except KeyboardInterrupt:
        click.echo(printable(f"to resume, start again with --dir {folder}"), err=True)
        raise
    for path in write_results(comparison, folder, sys.stdout, with_page=not no_page, with_png=png):
        click.echo(printable(f"written {path}"))
    raise SystemExit(EXIT_FAILED if comparison.failed else EXIT_VERIFICATION if comparison.broken else EXIT_DONE)
