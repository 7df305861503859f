"""Evaluate a saved run exactly: every validation sample once, on any number of processes."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.commands import _completion
from lockstep.core.text import printable, printable_line
from lockstep.errors import LockstepError, UsageError
from lockstep.launchers import detect, located
from lockstep.parent import die_with_launcher

if TYPE_CHECKING:
    import torch

    from lockstep.config.load import Loaded
    from lockstep.core.rank import RankInfo
    from lockstep.run.build import Setup
    from lockstep.runtime.meeting import Meeting
    from lockstep.training.checkpoint import Found
    from lockstep.training.saved_state import SavedState


@click.command("eval")
@click.argument("checkpoint", shell_complete=_completion.files)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_completion.overrides)
@click.option("--trust", is_flag=True, help="Run the code that the checkpoint's recipe names.")
def command(checkpoint: str, overrides: tuple[str, ...], trust: bool) -> None:
    """Evaluate CHECKPOINT: a run folder (its newest checkpoint), or a checkpoint such as runs/a/checkpoints/best.

    The recipe is the one it was trained by. Overrides are dotted: placement.processes=4 recipe.data.root=/data.
    Code that it names, such as recipe.model.name: my.nets:net, runs only if an override names it too, or with --trust.
    """
    info, asked = detect(os.environ), Asked(checkpoint, overrides, trust)
    raise SystemExit(_as_rank(info, asked) if info else _here(asked))


@dataclass(frozen=True)
class Asked:
    """What the user typed."""

    path: str
    overrides: tuple[str, ...]
    trust: bool


def _as_rank(info: RankInfo, asked: Asked) -> int:
    """Evaluate as one rank of those that another launcher started."""
    die_with_launcher(info.launcher)  # before the imports, which take seconds
    info = located(info, os.environ)

    from lockstep.config.placement import rendezvous
    from lockstep.runtime.member import as_rank, refuse

    try:
        _, loaded = _open(asked)
    except LockstepError as error:
        refuse(info, rendezvous(asked.overrides), error)
    for note in loaded.notes if info.rank == 0 else ():
        click.echo(f"note: {note}", err=True)
    placement = loaded.config.placement
    return as_rank(
        info,
        placement.rendezvous,
        placement.timeout_s,
        placement.lost_after_s,
        lambda meeting: _evaluate_as(meeting, asked),
    )


def _here(asked: Asked) -> int:
    """Check everything in this process, then evaluate in it, or start the processes that do."""
    import torch

    from lockstep.run import build
    from lockstep.run.resume import evaluated
    from lockstep.run.strategy import check_strategy, find_strategy
    from lockstep.runtime.agent import run_workers
    from lockstep.runtime.member import alone

    torch.set_num_threads(1)  # forked workers must not inherit a pool of threads
    found, loaded = _open(asked)
    for note in loaded.notes:
        click.echo(f"note: {note}", err=True)
    count = build.processes(loaded.config)
    # No step is shared here, so there may be more processes than micro-batches.
    name, chosen = find_strategy(loaded.config.placement, count)
    check_strategy(name, chosen, count, max(count, loaded.config.recipe.microbatches))
    ready = build.setup(loaded.config.recipe)
    evaluated(found.path, found.snapshot, ready)
    build.check_cut(ready, loaded.config, count)
    for problem in found.problems:
        click.echo(printable(f"warning: {problem}"), err=True)
    if count == 1:
        return _evaluate_as(alone(), asked, found, ready)
    method = build.start_method(loaded.config.placement)
    shared = (found, ready) if method == "fork" else (None, None)
    return run_workers(partial(_worker, asked, *shared), count, method, loaded.config.placement.timeout_s)


def _worker(asked: Asked, found: Found | None, ready: Setup | None, meeting: Meeting) -> int:
    """Evaluate as one of the processes that `_here` started."""
    return _evaluate_as(meeting, asked, found, ready)


def _evaluate_as(meeting: Meeting, asked: Asked, found: Found | None = None, ready: Setup | None = None) -> int:
    from lockstep.run import build
    from lockstep.run.resume import evaluated
    from lockstep.run.session import started_with, watched
    from lockstep.runtime.memory import keep_freed_memory
    from lockstep.runtime.precision import fix_kernels
    from lockstep.runtime.switches import check_switches
    from lockstep.runtime.world import choose_device
    from lockstep.training import checkpoint

    opened, loaded = _open(asked, found)
    recipe, placement = loaded.config.recipe, loaded.config.placement
    device = choose_device(placement.device, meeting.info, placement.backend)
    fix_kernels(recipe.threads, recipe.precision, device)
    keep_freed_memory()
    if device.type == "cuda":
        check_switches(recipe.precision)
    with watched(meeting, loaded.config.placement, device):
        facts = started_with(loaded, device)
        meeting.compare(facts | {"weights": checkpoint.weights_sha256(opened.snapshot.model)})
        ready = ready or build.setup(loaded.config.recipe)
        state = evaluated(opened.path, opened.snapshot, ready)
        meeting.compare(build.setup_facts(ready))
        return _evaluate(loaded, opened, state, ready, meeting, device)


def _open(asked: Asked, found: Found | None = None) -> tuple[Found, Loaded]:
    """Load a checkpoint, and from it the configuration; where its data lies is the run folder's to know."""
    from lockstep.config.base import values
    from lockstep.config.load import load_text, recorded
    from lockstep.run.resume import saved_recipe, signing_key
    from lockstep.training import checkpoint

    is_new = found is None
    found = found or checkpoint.load(Path(asked.path))
    recipe = values(saved_recipe(found.path, found.snapshot))
    run_config = found.path.parent.parent / "config.yaml"
    if os.path.lexists(run_config):
        data = recorded(run_config).data
        recipe["data"] |= {"root": data.root, "download": data.download}
    label, text = str(found.path / checkpoint.STATE), json.dumps({"recipe": recipe})
    loaded = load_text(text, label, found.path.name, asked.overrides, shares_steps=False)
    _check_code(asked, loaded)
    key = signing_key(loaded.config.run)
    if key is not None and is_new:  # only now is it known, and what was read has done nothing yet
        signed = checkpoint.load(found.path, key=key)
        if signed.snapshot.state != found.snapshot.state:
            raise UsageError(f"{found.path}: changed while it was read; try again")
        found = found._replace(snapshot=signed.snapshot)
    return found, loaded


def _check_code(asked: Asked, loaded: Loaded) -> None:
    """Raise UsageError where the recipe names code that the user did not: who wrote the folder could run anything."""
    from lockstep.run.user_code import import_paths

    recipe = loaded.config.recipe
    # A colon in a name of timm's is no import path, but says where to fetch a model from.
    model = {"model": recipe.model.name} if ":" in recipe.model.name else {}
    keys = {f"recipe.{section}.name": name for section, name in {**model, **import_paths(recipe)}.items()}
    foreign = [f"{key}={name}" for key, name in keys.items() if loaded.origins[key] != "override"]
    if foreign and not asked.trust:
        words = " ".join(["lockstep eval", *map(shlex.quote, [asked.path, *foreign])])
        raise UsageError(
            f"{asked.path}: its recipe names code, which would run with your rights: {', '.join(foreign)}; code of a "
            f"run folder runs only if your command names it: {words}; or all of it, with --trust"
        )


def _evaluate(
    loaded: Loaded, found: Found, state: SavedState, ready: Setup, meeting: Meeting, device: torch.device
) -> int:
    from lockstep.reporting import wording
    from lockstep.run.build import evaluation_batch, start
    from lockstep.run.session import engine_state, evaluated
    from lockstep.runtime.affinity import bind
    from lockstep.runtime.doing import Doing
    from lockstep.runtime.world import open_world
    from lockstep.training import checkpoint

    recipe, placement = loaded.config.recipe, loaded.config.placement
    world = open_world(meeting, device, placement.backend)
    if placement.affinity == "auto":
        bind(world, recipe.threads)
    _, engine, loader = start(ready, placement, world)
    # An optimizer is not needed; what the engine has of it is as good as what was saved.
    engine.load(replace(engine_state(found.snapshot), optimizer={}, scalars=engine.state().scalars))
    progress = state.progress
    meeting.doing = lambda: Doing("evaluating", progress.step)
    event = evaluated(engine, world, ready, loader, evaluation_batch(recipe), progress)
    if world.rank == 0:
        click.echo(f"{printable_line(str(found.path))}, after step {progress.step}")
        click.echo(wording.evaluated(event))
        click.echo(f"weights sha256 {checkpoint.weights_sha256(found.snapshot.model)}")
    engine.close()
    world.close()
    return 0
