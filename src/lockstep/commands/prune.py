"""Remove older checkpoints of runs; the newest ones and the best one stay.

A run that trains keeps all it has, and so does one whose newest checkpoint is damaged: an older one may be needed.
"""

from contextlib import ExitStack
from pathlib import Path

import click

from lockstep.common.text import printable_line, size
from lockstep.errors import DataError, LockstepError, UsageError


@click.command("prune")
@click.argument("folders", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--keep", type=click.IntRange(1), default=1, show_default=True, help="How many newest ones stay.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, and name what would be removed.")
def command(folders: tuple[Path, ...], keep: int, dry_run: bool) -> None:
    """Remove checkpoints of each RUN, a run folder or a folder that holds some, to free the disk.

    The newest --keep stay, and always those that `latest` and `best` point to; of what is left a run resumes, is
    evaluated and predicts. A run that trains, or whose newest checkpoint is damaged, keeps all it has.
    """
    from lockstep.runs.runs import run_folders
    from lockstep.training.checkpoint import store
    from lockstep.training.lock import lock

    for folder in folders:
        if next(run_folders(folder), None) is None:
            raise UsageError(f"{folder}: no run, and none in it; name a run folder, or a folder that holds some")
    surplus: dict[Path, list[Path]] = {}
    kept: list[LockstepError] = []
    with ExitStack() as held:
        for run in run_folders(*folders):
            try:
                held.enter_context(lock(run))
                surplus[run] = store.surplus(run / store.FOLDER, keep)
            except UsageError as error:
                kept.append(error)
            except DataError as error:
                kept.append(DataError(f"{error}; {run} keeps all: remove that checkpoint if an older one will do"))
        freed, verb = 0, "would free" if dry_run else "freed"
        for run, paths in surplus.items():
            freed += (count := sum(map(store.size, paths)))
            what = ", ".join(path.name for path in paths)
            click.echo(f"{printable_line(str(run))}: {f'{verb} {size(count)}: {what}' if paths else 'nothing'}")
            for path in () if dry_run else paths:
                store.remove(path)
    if len(surplus) > 1:
        click.echo(f"{verb} {size(freed)} in all")
    if kept:
        raise type(kept[0])("\n".join(map(str, kept)))
