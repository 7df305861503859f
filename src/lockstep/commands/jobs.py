"""Show the state, progress, speed and time left of runs, from their event logs and Slurm's queue."""

import json
import sys
import time
from pathlib import Path
from typing import Final

import click

from lockstep.common.location import reject_url
from lockstep.common.text import printable_line

_RUNS: Final = "runs"


@click.command("jobs")
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with an object for each run.")
def command(folders: tuple[str, ...], as_json: bool) -> None:
    """Show the runs in each FOLDER, most recently active first. FOLDER defaults to runs/.

    A FOLDER is a run folder or contains run folders, possibly in subfolders. If the recipes of the runs differ, the
    table shows the keys that differ. The reasons for failures are below the table.

    Columns: figure is the monitored metric of the last evaluation, and loss is the loss of that evaluation, or of the
    last training step (train) before the first evaluation. best marks the run with the best last evaluation, if all
    runs use the same metric and have validation splits of the same size. step and epoch are the progress, left is the
    remaining time, and last is the age of the last event. samples/s includes the time of evaluations and saves.
    """
    from lockstep.jobs.reader import read_runs
    from lockstep.reporting.jobs_table import print_overview, to_json_dicts

    for folder in folders:
        reject_url(folder, "jobs")
    if not folders and not Path(_RUNS).exists():
        click.echo("[]" if as_json else f"no runs yet: folder {_RUNS} does not exist; pass the folder of your runs")
        return
    runs, warnings = read_runs(map(Path, folders or (_RUNS,)))
    if as_json:
        click.echo(json.dumps(to_json_dicts(runs), indent=1))
    elif runs:
        print_overview(runs, time.time(), sys.stdout)
    else:
        click.echo(f"no runs in {', '.join(folders) or _RUNS}")
    for line in warnings:
        click.echo(printable_line(f"warning: {line}"), err=True)
