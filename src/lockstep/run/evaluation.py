"""`lockstep eval` below its options: open a checkpoint and evaluate it on the ranks."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from lockstep.comm.world import open_world
from lockstep.config.base import values
from lockstep.config.load import Loaded, load_text, recorded
from lockstep.config.placement import Placement
from lockstep.config.write import flow
from lockstep.core.rank import RankInfo
from lockstep.core.text import printable
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.ranks.affinity import bind
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import Status
from lockstep.run.build import Setup, evaluation_batch, setup
from lockstep.run.checks import check_compile, check_cut
from lockstep.run.compared import started_with
from lockstep.run.computing import computing_device
from lockstep.run.engine import start_engine
from lockstep.run.events import evaluated
from lockstep.run.facts import setup_facts
from lockstep.run.rank_training import engine_state
from lockstep.run.resolved import resolve
from lockstep.run.resume import evaluated as checked_state
from lockstep.run.resume import saved_recipe, signing_key
from lockstep.run.start import Work, on_ranks
from lockstep.run.strategy import check_strategy
from lockstep.run.user_code import import_paths
from lockstep.run.watching import watched
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.saved_state import SavedState
from lockstep.training.events import Evaluated


@dataclass(frozen=True)
class Asked:
    """A saved run, what overrides its recipe, and whether the code it names may run.

    `path` is a checkpoint, or a run folder, of which `prefer` says which checkpoint. `command` is what the user called.
    """

    path: str
    overrides: tuple[str, ...] = ()
    trust: bool = False
    prefer: Literal["newest", "best"] = "newest"
    command: str = "eval"


class Found(NamedTuple):
    """What an evaluation gave, of which checkpoint."""

    path: Path
    event: Evaluated
    weights_sha256: str


Tell = Callable[[Found], None]  # called on rank 0
Opened = tuple[store.Found, Setup]


def evaluate_here(asked: Asked, tell: Tell) -> int:
    """Check everything in this process, then evaluate in it, or start the processes that do; return the exit code."""
    torch.set_num_threads(1)  # see run/start.py
    found, loaded = opened(asked)
    for note in loaded.notes:
        _say(f"note: {note}")
    resolved = resolve(loaded)
    count = resolved.processes
    # No step is shared here, so there may be more processes than micro-batches.
    check_strategy(resolved.strategy_name, resolved.strategy, count, max(count, resolved.recipe.microbatches))
    check_compile(resolved)
    ready = _setup(loaded)
    checked_state(found.path, found.snapshot, ready)
    check_cut(resolved, ready)
    for problem in found.problems:
        _say(f"warning: {problem}")
    return on_ranks(partial(_evaluate_as, asked, tell), (found, ready), resolved.placement, count)


def opened_as_rank(asked: Asked, info: RankInfo, tell: Tell) -> tuple[Placement, Work]:
    """Check all that can be checked before the ranks of a launcher meet; return what they are to do."""
    _, loaded = opened(asked)
    for note in loaded.notes if info.rank == 0 else ():
        _say(f"note: {note}")
    return loaded.config.placement, partial(_evaluate_as, asked, tell, None)


def opened(asked: Asked, found: store.Found | None = None) -> tuple[store.Found, Loaded]:
    """Load a checkpoint, and from it the configuration; where its data lies is the run folder's to know."""
    is_new = found is None
    found = found or store.load(Path(asked.path), asked.prefer)
    recipe = values(saved_recipe(found.path, found.snapshot))
    run_config = found.path.parent.parent / "config.yaml"
    if os.path.lexists(run_config):
        data = recorded(run_config).data
        recipe["data"] |= {"root": data.root, "download": data.download}
    label, text = str(found.path / store.STATE), json.dumps({"recipe": recipe})
    loaded = load_text(text, label, found.path.name, asked.overrides, shares_steps=False)
    _check_code(asked, loaded)
    key = signing_key(loaded.config.run)
    if key is not None and is_new:  # only now is it known, and what was read has done nothing yet
        signed = store.load(found.path, key=key)
        if signed.snapshot.state != found.snapshot.state:
            raise UsageError(f"{found.path}: changed while it was read; try again")
        found = found._replace(snapshot=signed.snapshot)
    return found, loaded


def _check_code(asked: Asked, loaded: Loaded) -> None:
    """Raise UsageError where the recipe names code that the user did not: who wrote the folder could run anything."""
    recipe = loaded.config.recipe
    # A colon in a name of timm's is no import path, but says where to fetch a model from.
    model = {"model": recipe.model.name} if ":" in recipe.model.name else {}
    paths = {section: name for section, name in import_paths(recipe).items() if not section.startswith("metrics.")}
    keys = {_key(section): name for section, name in {**model, **paths}.items()}
    keys |= {"recipe.metrics": flow(recipe.metrics)} if recipe.metrics else {}
    foreign = [f"{key}={name}" for key, name in keys.items() if loaded.origins[key] != "override"]
    if foreign and not asked.trust:
        words = " ".join([f"lockstep {asked.command}", *map(shlex.quote, [asked.path, *foreign])])
        raise UsageError(
            f"{asked.path}: its recipe names code, which would run with your rights: {', '.join(foreign)}; code of a "
            f"run folder runs only if your command names it: {words}; or all of it, with --trust"
        )


def _key(section: str) -> str:
    return "recipe.data.collate" if section == "collate" else f"recipe.{section}.name"


def _setup(loaded: Loaded) -> Setup:
    ready = setup(loaded.config.recipe)
    if ready.data.validation is None:
        raise UsageError(
            f"data set {loaded.config.recipe.data.name}: it has no validation part, so there is nothing to evaluate; "
            f"give it one"
        )
    return ready


def _evaluate_as(asked: Asked, tell: Tell, ready: Opened | None, rendezvous: Rendezvous) -> int:
    found, loaded = opened(asked, ready[0] if ready else None)
    recipe, placement = loaded.config.recipe, loaded.config.placement
    device = computing_device(placement, rendezvous.info, recipe.threads, recipe.precision)
    with watched(rendezvous, placement, device):
        facts = started_with(loaded, device)
        rendezvous.compare(facts | {"weights": store.weights_sha256(found.snapshot.model)})
        made = ready[1] if ready else _setup(loaded)
        state = checked_state(found.path, found.snapshot, made)
        rendezvous.compare(setup_facts(made))
        event = _evaluate(loaded, found, state, made, rendezvous, device)
    if event is not None:
        tell(Found(found.path, event, store.weights_sha256(found.snapshot.model)))
    return EXIT_DONE


def _evaluate(
    loaded: Loaded,
    found: store.Found,
    state: SavedState,
    ready: Setup,
    rendezvous: Rendezvous,
    device: torch.device,
) -> Evaluated | None:
    """Evaluate with the ranks that have met, and return the event on rank 0."""
    resolved = resolve(loaded, rendezvous.info.size)
    check_compile(resolved)
    world = open_world(rendezvous, device, resolved.placement.backend)
    if resolved.placement.affinity == "auto":
        bind(world, resolved.recipe.threads)
    engine, loader = start_engine(ready, resolved, world)
    # An optimizer is not needed; what the engine has of it is as good as what was saved.
    engine.load(replace(engine_state(found.snapshot), optimizer={}, scalars=engine.state().scalars))
    progress = state.progress
    rendezvous.status = lambda: Status("evaluating", progress.step)
    event = evaluated(engine, world, ready, loader, evaluation_batch(resolved.recipe), progress)
    engine.close()
    world.close()
    return event if world.rank == 0 else None


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)
