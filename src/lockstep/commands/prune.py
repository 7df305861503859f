"""Remove older checkpoints of runs, but keep the newest and the best checkpoints.

A run that is training, or whose newest checkpoint is damaged, keeps all checkpoints, because it may need an older one.
"""

from contextlib import ExitStack
from pathlib import Path

import click

from lockstep.common.location import reject_url
from lockstep.common.text import format_bytes, format_count, printable_line
from lockstep.errors import DataError, LockstepError, UsageError


@click.command("prune")
@click.argument("folders", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--keep", type=click.IntRange(1), default=1, show_default=True, help="Number of newest checkpoints to keep."
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, and list what would be removed.")
def command(folders: tuple[Path, ...], keep: int, dry_run: bool) -> None:
    """Remove checkpoints of each RUN, a run folder or a folder of runs, to free disk space.

    The newest --keep checkpoints stay, and the checkpoints that `latest` and `best` point to always stay. You can still
    resume and evaluate the run, and predict with it. For each run, the sizes of the removed and the kept checkpoints
    are shown. A run that is training, or whose newest checkpoint is damaged, keeps all checkpoints.
    """
    from lockstep.runs.runs import find_run_folders
    from lockstep.training.checkpoint import store
    from lockstep.training.lock import lock

    for folder in folders:
        reject_url(folder, "prune")
        if next(find_run_folders(folder), None) is None:
            raise UsageError(f"{folder}: contains no run; pass a run folder, or a folder of runs")
    surplus: dict[Path, list[Path]] = {}
    problems: list[LockstepError] = []
    with ExitStack() as locks:
        for run in find_run_folders(*folders):
            try:
                locks.enter_context(lock(run, "it keeps all checkpoints until it ends"))
                surplus[run] = store.find_surplus(run / store.FOLDER, keep)
            except UsageError as error:
                problems.append(error)
            except DataError as error:
                advice = "remove the damaged checkpoint if an older one is enough"
                problems.append(DataError(f"{error}; {run} keeps all checkpoints: {advice}"))
        total_freed, total_kept, verb = 0, 0, "would free" if dry_run else "freed"
        for run, paths in surplus.items():
            kept_paths = [path for path in store.list_checkpoints(run / store.FOLDER) if path not in paths]
            total_freed += (freed_bytes := sum(map(store.compute_size, paths)))
            total_kept += (kept_bytes := sum(map(store.compute_size, kept_paths)))
            names = ", ".join(path.name for path in paths)
            done = f"{verb} {format_bytes(freed_bytes)}: {names}" if paths else "nothing to remove"
            kept = f"{format_count(len(kept_paths), 'checkpoint')}, {format_bytes(kept_bytes)}"
            click.echo(f"{printable_line(str(run))}: {done}; keeps {kept}")
            for path in () if dry_run else paths:
                store.remove(path)
    if len(surplus) > 1:
        click.echo(f"{verb} {format_bytes(total_freed)} in all; keeps {format_bytes(total_kept)}")
    if problems:
        raise type(problems[0])("\n".join(map(str, problems)))
