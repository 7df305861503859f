"""Train a recipe on any number of processes.

The numbers are the recipe's; how many processes share the work, and who started them, changes only the time.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import click

from lockstep.commands import _completion
from lockstep.core.text import printable
from lockstep.errors import EXIT_DONE, LockstepError, UsageError
from lockstep.launchers import detect, located, torchrun
from lockstep.parent import die_with_launcher, parent_command
from lockstep.runtime.voice import outliving_terminal

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.config.schema import Config
    from lockstep.core.rank import RankInfo
    from lockstep.run.build import Setup
    from lockstep.run.session import Start
    from lockstep.runtime.meeting import Meeting


@click.command("train")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_completion.words)
def command(words: tuple[str, ...]) -> None:
    """Train RECIPE, a YAML file or the name of a shipped recipe (digits, if left out).

    Overrides are dotted: recipe.optimizer.lr=0.1 placement.processes=2 run.dir=runs/a
    """
    info = detect(os.environ)
    if info is not None:
        die_with_launcher(info.launcher)  # before the imports, which take seconds
        info = located(info, os.environ)
    with outliving_terminal():
        raise SystemExit(_alone(words) if info is None else _there(info, words))


def _alone(words: tuple[str, ...]) -> int:
    """Train where no other launcher started anything, unless all is done already."""
    from lockstep.run.finished import finished

    loaded = _loaded(words)
    done = finished(loaded)
    if done:
        click.echo(printable(done))
    return EXIT_DONE if done else _here(loaded)


def _there(info: RankInfo, words: tuple[str, ...]) -> int:
    """Check what can be checked, and train as one rank of those that another launcher started."""
    from lockstep.config.placement import rendezvous

    try:
        loaded = _checked(_loaded(words, say=info.rank == 0), info)
    except LockstepError as error:
        from lockstep.runtime.member import refuse

        refuse(info, rendezvous(words), error)
    return _as_rank(loaded, info)


def _loaded(words: tuple[str, ...], say: bool = True) -> Loaded:
    from lockstep.config.load import load, split

    loaded = load(*split(words))
    for note in loaded.notes if say else ():
        click.echo(printable(f"note: {note}"), err=True)
    return loaded


def _as_rank(loaded: Loaded, info: RankInfo) -> int:
    """Meet the other ranks and train."""
    from lockstep.run.session import run_rank
    from lockstep.runtime.member import as_rank

    placement = loaded.config.placement
    return as_rank(
        info,
        placement.rendezvous,
        placement.timeout_s,
        placement.lost_after_s,
        lambda meeting: run_rank(loaded, meeting, None),
    )


def _checked(loaded: Loaded, info: RankInfo) -> Loaded:
    """Check all that can be checked before the ranks meet, and return the configuration."""
    from lockstep.config.blame import with_places
    from lockstep.run import build

    _check_launch(loaded.config, info)
    with with_places(loaded):
        build.check_placement(loaded.config, info.size)
    return loaded


def _check_launch(config: Config, info: RankInfo) -> None:
    """Raise UsageError where the launcher started another run than the one that was asked for."""
    if info.launcher == "torchrun":
        agent = parent_command()
        torchrun.check_hosts(agent, os.environ)
        warning = torchrun.warning(agent, os.environ)
        if warning and info.rank == 0:
            click.echo(warning, err=True)
        torchrun.check_restarts(agent, os.environ, config.run.dir)
    asked = config.placement.processes
    if asked not in ("auto", info.size):
        raise UsageError(
            f"placement.processes: {asked} asked for, but the launcher says WORLD_SIZE={info.size}; "
            f"start as many, or leave placement.processes out"
        )


def _here(loaded: Loaded) -> int:
    """Check everything in this process, then train in it, or start the processes that do."""
    import torch

    from lockstep.config.blame import with_places
    from lockstep.run import build
    from lockstep.run import folder as run_folder
    from lockstep.run.session import Start, run_rank
    from lockstep.runtime.agent import run_workers
    from lockstep.runtime.member import alone

    torch.set_num_threads(1)  # forked workers must not inherit a pool of threads
    with with_places(loaded):
        count = build.processes(loaded.config)
        build.check_placement(loaded.config, count)
        ready = build.setup(loaded.config.recipe)
        build.check_cut(ready, loaded.config, count)
        build.check_kernels(ready, loaded.config.placement)
    for warning in ready.warnings:
        click.echo(printable(f"warning: {warning}"), err=True)
    claim = run_folder.claim(loaded)
    with claim.held():
        for note in claim.notes:
            click.echo(printable(note), err=True)
        start = Start(claim.folder, claim.checkpoint, claim.done)
        if count == 1:
            return run_rank(loaded, alone(), start, ready)
        method = build.start_method(loaded.config.placement)
        worker = partial(_worker, loaded, start, ready if method == "fork" else None)
        reasons: list[str] = []
        code = run_workers(
            worker, count, method, loaded.config.placement.timeout_s, claim.folder / run_folder.LOGS, reasons.append
        )
        run_folder.settle(claim.folder, code, *reasons)
        return code


def _worker(loaded: Loaded, start: Start, ready: Setup | None, meeting: Meeting) -> int:
    """Train as one of the processes that `_here` started."""
    from lockstep.run.session import run_rank

    return run_rank(loaded, meeting, start, ready)
