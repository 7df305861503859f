"""Evaluate a saved run exactly: every validation sample once, on any number of processes."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.errors import LockstepError
from lockstep.launchers import detect
from lockstep.parent import die_with_launcher

if TYPE_CHECKING:
    import torch

    from lockstep.commands._setup import Setup
    from lockstep.config.load import Loaded
    from lockstep.core.rank import RankInfo
    from lockstep.runtime.meeting import Meeting
    from lockstep.training.checkpoint import Found


@click.command("eval")
@click.argument("checkpoint")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def command(checkpoint: str, overrides: tuple[str, ...]) -> None:
    """Evaluate CHECKPOINT: a run folder (its newest checkpoint), or a checkpoint such as runs/a/checkpoints/best.

    The recipe is the one it was trained by. Overrides are dotted: placement.processes=4 recipe.data.root=/data
    """
    info = detect(os.environ)
    raise SystemExit(_as_rank(info, checkpoint, overrides) if info else _here(checkpoint, overrides))


def _as_rank(info: RankInfo, path: str, overrides: tuple[str, ...]) -> int:
    """Evaluate as one rank of those that another launcher started."""
    die_with_launcher(info.launcher)  # before the imports, which take seconds

    from lockstep.config.placement import rendezvous
    from lockstep.runtime.member import as_rank, refuse

    try:
        _, loaded = _open(path, overrides)
    except LockstepError as error:
        refuse(info, rendezvous(overrides), error)
    placement = loaded.config.placement
    return as_rank(
        info,
        placement.rendezvous,
        placement.timeout_s,
        placement.lost_after_s,
        lambda meeting: _evaluate_as(meeting, path, overrides),
    )


def _here(path: str, overrides: tuple[str, ...]) -> int:
    """Check everything in this process, then evaluate in it, or start the processes that do."""
    import torch

    from lockstep.commands import _setup
    from lockstep.runtime.agent import run_workers
    from lockstep.runtime.member import alone

    torch.set_num_threads(1)  # forked workers must not inherit a pool of threads
    found, loaded = _open(path, overrides)
    count = _setup.processes(loaded.config)
    # No step is shared here, so there may be more processes than micro-batches.
    _setup.strategy(loaded.config.placement, count)[1].check(count, max(count, _microbatches(found)))
    ready = _setup.setup(loaded.config.recipe, _microbatches(found))
    _setup.check_cut(ready, loaded.config, count)
    for problem in found.problems:
        click.echo(f"warning: {problem}", err=True)
    if count == 1:
        return _evaluate_as(alone(), path, overrides, found, ready)
    method = _setup.start_method(loaded.config.placement)
    shared = (found, ready) if method == "fork" else (None, None)
    return run_workers(partial(_worker, path, overrides, *shared), count, method, loaded.config.placement.timeout_s)


def _worker(path: str, overrides: tuple[str, ...], found: Found | None, ready: Setup | None, meeting: Meeting) -> int:
    """Evaluate as one of the processes that `_here` started."""
    return _evaluate_as(meeting, path, overrides, found, ready)


def _evaluate_as(
    meeting: Meeting,
    path: str,
    overrides: tuple[str, ...],
    found: Found | None = None,
    ready: Setup | None = None,
) -> int:
    from lockstep.commands import _setup
    from lockstep.commands._training import started_with, watched
    from lockstep.runtime.memory import keep_freed_memory
    from lockstep.runtime.precision import fix_kernels
    from lockstep.runtime.world import choose_device
    from lockstep.training import checkpoint

    opened, loaded = _open(path, overrides, found)
    fix_kernels(loaded.config.recipe.threads)
    keep_freed_memory()
    device = choose_device(loaded.config.placement.device, meeting.info)
    with watched(meeting, loaded.config.placement, device):
        facts = started_with(loaded, _microbatches(opened), device)
        meeting.compare(facts | {"weights": checkpoint.weights_sha256(opened.snapshot.model)})
        ready = ready or _setup.setup(loaded.config.recipe, _microbatches(opened))
        meeting.compare(_setup.data_facts(ready))
        return _evaluate(loaded, opened, ready, meeting, device)


def _open(path: str, overrides: tuple[str, ...], found: Found | None = None) -> tuple[Found, Loaded]:
    """Load a checkpoint, and from it the configuration; where its data lies is the run folder's to know."""
    from lockstep.config.load import load, load_text
    from lockstep.training import checkpoint

    found = found or checkpoint.load(Path(path))
    recipe = dict(found.snapshot.state["recipe"])
    run_config = found.path.parent.parent / "config.yaml"
    if run_config.exists():
        data = load(str(run_config)).config.recipe.data
        recipe["data"] = {**recipe["data"], "root": data.root, "download": data.download}
    # More processes than micro-batches may evaluate, so the recipe does not say here how many it has.
    text = json.dumps({"recipe": {**recipe, "microbatches": None}})
    return found, load_text(text, str(found.path / checkpoint.STATE), found.path.name, overrides)


def _microbatches(found: Found) -> int:
    return int(found.snapshot.state["microbatches"])


def _evaluate(loaded: Loaded, found: Found, ready: Setup, meeting: Meeting, device: torch.device) -> int:
    from lockstep.commands._setup import evaluation_batch, start
    from lockstep.commands._training import engine_state, evaluated
    from lockstep.reporting import wording
    from lockstep.runtime.doing import Doing
    from lockstep.runtime.world import open_world
    from lockstep.training import checkpoint
    from lockstep.training.loop import Progress

    recipe, placement = loaded.config.recipe, loaded.config.placement
    world = open_world(meeting, device)
    microbatches = _microbatches(found)
    _, place, engine = start(ready, placement, world, microbatches)
    loader = ready.loader(world, place, microbatches, placement.workers)
    engine.load(engine_state(found.snapshot))
    progress = Progress(**found.snapshot.state["progress"])
    meeting.doing = lambda: Doing("evaluating", progress.step)
    event = evaluated(engine, world, ready, loader, evaluation_batch(recipe, microbatches), progress)
    if world.rank == 0:
        click.echo(f"{found.path}, after step {progress.step}")
        click.echo(wording.evaluated(event))
        click.echo(f"weights sha256 {checkpoint.weights_sha256(found.snapshot.model)}")
    engine.close()
    world.close()
    return 0
