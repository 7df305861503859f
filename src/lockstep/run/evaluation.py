"""`lockstep eval` below its options: open a checkpoint, or weights that a recipe names, and evaluate on the ranks."""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch

from lockstep.common.rank import RankInfo
from lockstep.config.base import values
from lockstep.config.load import Loaded, comparable, differences, load_text, read_run_recipe
from lockstep.config.placement import Placement
from lockstep.config.recipe import TRAINING_KEYS
from lockstep.config.recorded import CONFIG
from lockstep.config.write import flow
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.parallel.layouts.base import gather_whole
from lockstep.ranks.affinity import bind
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import RankStatus
from lockstep.run.checkpoints import engine_state
from lockstep.run.events import evaluation_event
from lockstep.run.session import open_recipe_rank
from lockstep.run.start import Work, on_ranks
from lockstep.runs.folder import say
from lockstep.setup.data_facts import setup_facts
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import Placed, Prepared, check, place
from lockstep.setup.resume import checkpoint_recipe
from lockstep.setup.resume import evaluation_state as checked_state
from lockstep.setup.user_code import import_paths
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.signing import signing_key
from lockstep.training.events import Evaluated
from lockstep.training.progress import Progress

_OF_TRAINING: Final = ("run.", *(f"recipe.{key}" for key in TRAINING_KEYS))  # beginnings of keys


@dataclass(frozen=True)
class EvalRequest:
    """A saved run, what overrides its recipe, and whether the code it names may run.

    `path` is a checkpoint, or a run folder, of which the newest checkpoint is meant, or the `best`. `command` is what
    the user called.
    """

    path: str
    overrides: tuple[str, ...] = ()
    trust: bool = False
    best: bool = False
    command: str = "eval"


class EvalResult(NamedTuple):
    """What an evaluation gave, of which checkpoint, or of the weights that which recipe names."""

    path: Path
    event: Evaluated
    weights_sha256: str


ReportResult = Callable[[EvalResult], None]  # called on rank 0
Opened = tuple[store.FoundCheckpoint, Prepared]


def evaluate_here(request: EvalRequest, report: ReportResult) -> int:
    """Check everything in this process, then evaluate in it, or start the processes that do; return the exit code."""
    torch.set_num_threads(1)  # see run/start.py
    found, loaded = open_checkpoint(request)
    for note in loaded.notes:
        say(f"note: {note}")
    prepared = _prepare(loaded, found)
    _check_run(found)
    checked_state(found.path, found.snapshot, prepared.ready)
    for problem in found.problems:
        say(f"warning: {problem}")
    return on_ranks(partial(_evaluate_as, request, report), (found, prepared), prepared.placement, prepared.processes)


def evaluate_weights(loaded: Loaded, report: ReportResult) -> int:
    """Evaluate the weights that a recipe begins from: as `evaluate_here`, and without a run."""
    torch.set_num_threads(1)  # see run/start.py
    for note in loaded.notes:
        say(f"note: {note}")
    prepared = _prepare(loaded, None)
    return on_ranks(partial(_on_rank, loaded, None, report), prepared, prepared.placement, prepared.processes)


def weights_as_rank(loaded: Loaded, report: ReportResult) -> tuple[Placement, Work]:
    """Return what the ranks of a launcher are to do, as `evaluate_weights` does here."""
    return loaded.config.placement, partial(_on_rank, loaded, None, report, None)


def evaluation_as_rank(request: EvalRequest, info: RankInfo, report: ReportResult) -> tuple[Placement, Work]:
    """Check all that can be checked before the ranks of a launcher join; return their placement and work."""
    _, loaded = open_checkpoint(request)
    for note in loaded.notes if info.rank == 0 else ():
        say(f"note: {note}")
    return loaded.config.placement, partial(_evaluate_as, request, report, None)


def open_checkpoint(
    request: EvalRequest, found: store.FoundCheckpoint | None = None
) -> tuple[store.FoundCheckpoint, Loaded]:
    """Load a checkpoint and the configuration of its evaluation; the run folder knows where its data is."""
    if request.command == "eval" and Path(request.path).is_file():
        raise UsageError(
            f"{request.path}: is a file; give a run folder or a checkpoint, or for weights their recipe: "
            f"lockstep eval RECIPE recipe.model.weights={shlex.quote(request.path)}"
        )
    is_new = found is None
    found = found or store.load(Path(request.path), "best" if request.best else "newest")
    recipe = values(checkpoint_recipe(found.path, found.snapshot))
    run_config = found.path.parent.parent / CONFIG
    if os.path.lexists(run_config):
        data = read_run_recipe(run_config).data
        recipe["data"] |= {"root": data.root, "download": data.download}
    label, text = str(found.path / store.STATE), json.dumps({"recipe": recipe})
    loaded = load_text(text, label, found.path.name, request.overrides, shares_steps=False)
    code = check_code(request, loaded)
    _check_keys(request, [key for key, origin in loaded.origins.items() if origin == "override" and key not in code])
    key = signing_key(loaded.config.run.key_file)
    if key is not None and is_new:  # only now is it known, and what was read has done nothing yet
        signed = store.load(found.path, key=key)
        if signed.snapshot.state != found.snapshot.state:
            raise UsageError(f"{found.path}: changed while it was read; try again")
        found = found._replace(snapshot=signed.snapshot)
    return found, loaded


def check_code(request: EvalRequest, loaded: Loaded) -> Mapping[str, str]:
    """Return the code that the recipe names, by key; UsageError where the user did not name it.

    Who wrote the folder could run anything.
    """
    recipe = loaded.config.recipe
    # A colon in a name of timm's is no import path, but says where to fetch a model from.
    model = {"model": recipe.model.name} if ":" in recipe.model.name else {}
    paths = {section: name for section, name in import_paths(recipe).items() if not section.startswith("metrics.")}
    keys = {_key(section): name for section, name in {**model, **paths}.items()}
    keys |= {"recipe.metrics": flow(recipe.metrics)} if recipe.metrics else {}
    foreign = [f"{key}={name}" for key, name in keys.items() if loaded.origins[key] != "override"]
    if foreign and not request.trust:
        words = " ".join(map(shlex.quote, foreign))
        raise UsageError(
            f"{request.path}: its recipe names code, which would run with your rights: {words}; it runs only if your "
            f"command names it: add these words, or --trust for all (from Python trust=True)"
        )
    return keys


def _check_keys(request: EvalRequest, overridden: Sequence[str]) -> None:
    """Raise UsageError for a key that says nothing of a saved run: a training alone reads it."""
    alone = request.command != "eval"  # in this process
    for key in overridden:
        idle = key.startswith(_OF_TRAINING) or (alone and key.startswith("placement.") and key != "placement.device")
        if idle and key != "run.key_file":
            raise UsageError(f"{key}: lockstep {request.command} does not use it; leave it out")


def _check_run(found: store.FoundCheckpoint) -> None:
    """Raise UsageError for a checkpoint in the folder of a run of another recipe: it is of a run that was there."""
    config = found.path.parent.parent / CONFIG
    if not os.path.lexists(config):
        return
    run, own = values(read_run_recipe(config)), values(checkpoint_recipe(found.path, found.snapshot))
    if comparable(run) != comparable(own):
        lines = [each.replace(" in the run,", " there,").removesuffix(" now") for each in differences(run, own)]
        raise UsageError(
            "\n".join([f"{found.path}: is not of the run that {config} is of; move it to a folder of its own:", *lines])
        )


def _key(section: str) -> str:
    return "recipe.data.collate" if section == "collate" else f"recipe.{section}.name"


def _prepare(loaded: Loaded, found: store.FoundCheckpoint | None, processes: int | None = None) -> Prepared:
    """Open and check what is evaluated: a checkpoint has its weights, else the recipe must name some."""
    if found is None:
        placed = place(loaded, processes, training=False)
        model = placed.resolved.recipe.model
        if placed.first is None and not model.pretrained:
            raise UsageError(
                f"model {model.name}: the recipe names no weights to evaluate; give recipe.model.weights=FILE, "
                f"recipe.model.pretrained=true, or in the place of the recipe a run folder"
            )
    else:
        placed = Placed(check(loaded, processes, training=False))
    prepared = placed.open(training=False)
    if prepared.ready.data.validation is None:
        raise UsageError(
            f"data set {loaded.config.recipe.data.name}: it has no validation part, so there is nothing to evaluate; "
            f"give it one"
        )
    return prepared


def _evaluate_as(request: EvalRequest, report: ReportResult, opened: Opened | None, rendezvous: Rendezvous) -> int:
    found, loaded = open_checkpoint(request, opened[0] if opened else None)
    return _on_rank(loaded, found, report, opened[1] if opened else None, rendezvous)


def _on_rank(
    loaded: Loaded,
    found: store.FoundCheckpoint | None,
    report: ReportResult,
    prepared: Prepared | None,
    rendezvous: Rendezvous,
) -> int:
    """Evaluate with the other ranks, which have joined: a checkpoint, else the weights that the recipe begins from."""
    recipe, placement = loaded.config.recipe, loaded.config.placement
    weights = {} if found is None else {"weights": store.weights_sha256(found.snapshot.model)}
    with open_recipe_rank(rendezvous, loaded, weights) as session:
        prepared = prepared or _prepare(loaded, found, rendezvous.info.size)
        ready = prepared.ready
        progress = Progress() if found is None else checked_state(found.path, found.snapshot, ready).progress
        rendezvous.compare(setup_facts(ready))
        with session.open_world() as world:
            if placement.affinity == "auto":
                bind(world, recipe.threads)
            engine, loader = start_engine(prepared, world)
            if found is not None:
                # An optimizer is not needed; what the engine has of it is as good as what was saved.
                engine.load(replace(engine_state(found.snapshot), optimizer={}, scalars=engine.state().scalars))
            model = found.snapshot.model if found is not None else gather_whole(world, engine.state().model)
            sha256 = store.weights_sha256(model)
            rendezvous.status = lambda: RankStatus("evaluating", progress.step)
            event = evaluation_event(engine, world, ready, loader, progress)
            engine.close()
    if rendezvous.info.rank == 0:
        first = recipe.model.weights
        named = loaded.name if first is None or first.path is None else first.path
        report(EvalResult(Path(named) if found is None else found.path, event, sha256))
    return EXIT_DONE
