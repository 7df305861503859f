"""Train a recipe on any number of processes.

The recipe determines the resulting weights. The number of processes and the launcher only affect the training time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import click

from lockstep.commands import _completion, _recipe
from lockstep.common.text import printable
from lockstep.errors import EXIT_DONE
from lockstep.launchers import detect_rank, slurm
from lockstep.ranks.rank_log import ignore_terminal_errors
from lockstep.ranks.signals import EarlyStop

if TYPE_CHECKING:
    from lockstep.common.rank import RankInfo
    from lockstep.config.load import LoadedConfig
    from lockstep.config.placement import Placement
    from lockstep.run.start import RankFunction


@click.command("train")
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_completion.complete_arguments)
@click.option(
    "--cfg", metavar="FILE", help="Instead of RECIPE: a configuration of another framework. See lockstep import."
)
@click.option("--gpus", type=click.IntRange(min=1), help="With --cfg: number of GPUs for the per-GPU batch size.")
def command(arguments: tuple[str, ...], cfg: str | None, gpus: int | None) -> None:
    """Train RECIPE, a YAML file or the name of a shipped recipe. RECIPE defaults to digits.

    Overrides are dotted: recipe.optimizer.lr=0.1 placement.processes=2 run.dir=runs/a
    """
    if gpus is not None and cfg is None:
        raise click.UsageError("--gpus: requires --cfg; for a recipe, set the global batch size in recipe.batch")
    info = detect_rank()  # called first, because later imports take seconds
    size = None if info is None else info.size
    load = partial(_recipe.load_from_arguments, arguments, cfg, gpus, size)
    with ignore_terminal_errors():
        if info is None:
            with EarlyStop() as early:
                code = _train_here(load, early.begin_training)
        else:
            with EarlyStop() if info.rank == 0 else nullcontext():
                code = _train_as_rank(info, arguments, load, cfg)
        raise SystemExit(code)


def _train_here(load: Callable[[], LoadedConfig], on_start: Callable[[], None]) -> int:
    """Train on this machine without a launcher, and return the exit code. For a complete run, only print a notice."""
    from lockstep.config.placement import FASTEST
    from lockstep.setup.completed import make_completion_notice

    loaded = load()
    _recipe.print_notes(loaded)
    if warning := slurm.make_warning(os.environ, loaded.config.placement.processes):
        click.echo(warning, err=True)
    if notice := make_completion_notice(loaded):
        click.echo(printable(notice))
        return EXIT_DONE
    _recipe.print_preparing(loaded.name)
    from lockstep.run.training import train_here  # imported lazily, because importing torch takes seconds

    if loaded.config.placement.strategy.name == FASTEST:
        from lockstep.planning.fastest import select_fastest

        loaded, message = select_fastest(loaded, _recipe.print_measurement)
        click.echo(message, err=True)
    return train_here(loaded, on_start=on_start)


def _train_as_rank(
    rank_info: RankInfo, arguments: tuple[str, ...], load_config: Callable[[], LoadedConfig], cfg: str | None
) -> int:
    from lockstep.config.load import split_arguments

    if rank_info.rank == 0:
        _recipe.print_preparing(cfg or split_arguments(arguments)[0])
    from lockstep.run.start import run_launched_rank
    from lockstep.run.training import prepare_training_rank

    def prepare_work() -> tuple[Placement, RankFunction]:
        loaded = load_config()
        if rank_info.rank == 0:
            _recipe.print_notes(loaded)
        return prepare_training_rank(loaded, rank_info)

    return run_launched_rank(rank_info, arguments, prepare_work)
