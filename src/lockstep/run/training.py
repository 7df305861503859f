"""`lockstep train` below its options: check everything in one place, then train on the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lockstep.common.follow_parent import parent_command
from lockstep.common.rank import RankInfo
from lockstep.common.text import printable
from lockstep.config.blame import with_places
from lockstep.config.load import Loaded
from lockstep.config.placement import Placement
from lockstep.config.schema import Config
from lockstep.errors import UsageError
from lockstep.launchers import torchrun
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.reporting.sink import Sink
from lockstep.run import folder as run_folder
from lockstep.run.build import Setup, setup
from lockstep.run.checks import check_cut, check_kernels, check_placement
from lockstep.run.first_weights import opened
from lockstep.run.rank_training import Start
from lockstep.run.resolved import Resolved, resolve
from lockstep.run.resume import check_first
from lockstep.run.session import run_rank
from lockstep.run.sinks import check_sinks
from lockstep.run.start import Work, on_ranks


def train_here(loaded: Loaded, also: Sink | None = None) -> int:
    """Check everything in this process, then train in it, or start the processes that do; return the exit code.

    `also` is a sink beside those that the configuration names; it can be sent to a spawned process.
    """
    torch.set_num_threads(1)  # see run/start.py
    with with_places(loaded):
        loaded, first = opened(loaded)
        resolved = resolve(loaded)
        check_sinks(resolved.run)
        check_placement(resolved)
        ready = setup(resolved.recipe, first)
        check_first(ready)
        check_cut(resolved, ready)
        check_kernels(resolved.placement, ready)
    for warning in ready.warnings:
        _say(f"warning: {warning}")
    claim = run_folder.claim(loaded)
    with claim.held():
        for note in claim.notes:
            _say(note)
        work = partial(_train, resolved, Start(claim.folder, claim.checkpoint, claim.done), also)
        return on_ranks_of(resolved, ready, work, claim.folder)


def on_ranks_of(resolved: Resolved, ready: Setup, work: Callable[[Setup | None, Rendezvous], int], folder: Path) -> int:
    """Do `work` on the ranks of a placement, and return the exit code; the run folder has their logs and the end."""
    reasons: list[str] = []
    code = on_ranks(work, ready, resolved.placement, resolved.processes, folder / run_folder.LOGS, reasons.append)
    if resolved.processes > 1:
        run_folder.settle(folder, code, *reasons)
    return code


def opened_as_rank(loaded: Loaded, info: RankInfo) -> tuple[Placement, Work]:
    """Check all that can be checked before the ranks of a launcher meet; return what they are to do."""
    _check_launch(loaded.config, info)
    with with_places(loaded):
        resolved = resolve(loaded, info.size)
        check_sinks(resolved.run)
        check_placement(resolved)
    return resolved.placement, partial(_train, resolved, None, None, None)


def _train(
    resolved: Resolved, start: Start | None, also: Sink | None, ready: Setup | None, rendezvous: Rendezvous
) -> int:
    return run_rank(resolved, rendezvous, start, ready, also)


def _check_launch(config: Config, info: RankInfo) -> None:
    """Raise UsageError where the launcher started another run than the one that was asked for."""
    if info.launcher == "torchrun":
        agent = parent_command()
        torchrun.check_hosts(agent, os.environ)
        warning = torchrun.warning(agent, os.environ)
        if warning and info.rank == 0:
            _say(warning)
        torchrun.check_restarts(agent, os.environ, config.run.dir)
    asked = config.placement.processes
    if asked not in ("auto", info.size):
        raise UsageError(
            f"placement.processes: {asked} asked for, but the launcher says WORLD_SIZE={info.size}; "
            f"start as many, or leave placement.processes out"
        )


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)
