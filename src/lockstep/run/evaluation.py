"""Implements `lockstep eval`: opens a checkpoint or the weights of a recipe, and evaluates on all ranks."""

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
from lockstep.parallel.layouts.base import gather_full_tensors
from lockstep.ranks.affinity import bind
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import RankStatus
from lockstep.run.checkpoints import engine_state
from lockstep.run.events import evaluation_event
from lockstep.run.session import open_recipe_rank
from lockstep.run.start import Work, on_ranks
from lockstep.runs.folder import print_message
from lockstep.setup.data_facts import setup_facts
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import Placed, PreparedRun, check, place
from lockstep.setup.resume import checkpoint_recipe
from lockstep.setup.resume import evaluation_state as checked_state
from lockstep.setup.user_code import import_paths
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.signing import signing_key
from lockstep.training.events import Evaluated
from lockstep.training.progress import Progress

# Key prefixes that only apply to training.
_TRAINING_PREFIXES: Final = ("run.", *(f"recipe.{key}" for key in TRAINING_KEYS))


@dataclass(frozen=True)
class EvalRequest:
    """A request to evaluate a saved run.

    - `path`: A checkpoint or a run folder.
    - `overrides`: Overrides of its recipe.
    - `trust`: Whether to trust the code that its recipe names.
    - `best`: Whether to use the best checkpoint of a run folder instead of the newest.
    - `command`: The name of the lockstep command.
    """

    path: str
    overrides: tuple[str, ...] = ()
    trust: bool = False
    best: bool = False
    command: str = "eval"


class EvalResult(NamedTuple):
    """The result of an evaluation. `path` is the checkpoint, the weights file of the recipe, or the recipe itself."""

    path: Path
    event: Evaluated
    weights_sha256: str


ReportResult = Callable[[EvalResult], None]  # called on rank 0
Opened = tuple[store.FoundCheckpoint, PreparedRun]


def evaluate_here(request: EvalRequest, report: ReportResult) -> int:
    """Check everything in this process, then evaluate in this process or in new processes. Returns the exit code."""
    torch.set_num_threads(1)  # see run/start.py
    checkpoint, loaded = open_checkpoint(request)
    for note in loaded.notes:
        print_message(f"note: {note}")
    prepared = _prepare(loaded, checkpoint)
    _check_run(checkpoint)
    checked_state(checkpoint.path, checkpoint.snapshot, prepared.ready)
    for problem in checkpoint.problems:
        print_message(f"warning: {problem}")
    return on_ranks(
        partial(_evaluate_as, request, report), (checkpoint, prepared), prepared.placement, prepared.processes
    )


def evaluate_weights(loaded: Loaded, report: ReportResult) -> int:
    """Evaluate the initial weights of a recipe, without a run. Otherwise the same as `evaluate_here`."""
    torch.set_num_threads(1)  # see run/start.py
    for note in loaded.notes:
        print_message(f"note: {note}")
    prepared = _prepare(loaded, None)
    return on_ranks(partial(_on_rank, loaded, None, report), prepared, prepared.placement, prepared.processes)


def weights_as_rank(loaded: Loaded, report: ReportResult) -> tuple[Placement, Work]:
    """Return the placement and the work of `evaluate_weights`, for ranks that a launcher started."""
    return loaded.config.placement, partial(_on_rank, loaded, None, report, None)


def evaluation_as_rank(request: EvalRequest, info: RankInfo, report: ReportResult) -> tuple[Placement, Work]:
    """Return the placement and the work of ranks that a launcher started. Checks what it can before the ranks join."""
    _, loaded = open_checkpoint(request)
    for note in loaded.notes if info.rank == 0 else ():
        print_message(f"note: {note}")
    return loaded.config.placement, partial(_evaluate_as, request, report, None)


def open_checkpoint(
    request: EvalRequest, checkpoint: store.FoundCheckpoint | None = None
) -> tuple[store.FoundCheckpoint, Loaded]:
    """Return a checkpoint and the configuration for evaluating it. Loads the checkpoint if `checkpoint` is None.

    The location of the data comes from the config.yaml of the run folder, if that file exists. Raises UsageError if the
    recipe names code that the user doesn't trust, or if the command ignores an override.
    """
    if request.command == "eval" and Path(request.path).is_file():
        raise UsageError(
            f"{request.path}: is a file; pass a run folder or a checkpoint, or evaluate weights with their recipe: "
            f"lockstep eval RECIPE recipe.model.weights={shlex.quote(request.path)}"
        )
    is_new = checkpoint is None
    checkpoint = checkpoint or store.load(Path(request.path), "best" if request.best else "newest")
    recipe = values(checkpoint_recipe(checkpoint.path, checkpoint.snapshot))
    run_config = checkpoint.path.parent.parent / CONFIG
    if os.path.lexists(run_config):
        data = read_run_recipe(run_config).data
        recipe["data"] |= {"root": data.root, "download": data.download}
    label, text = str(checkpoint.path / store.STATE), json.dumps({"recipe": recipe})
    loaded = load_text(text, label, checkpoint.path.name, request.overrides, shares_steps=False)
    code = check_code(request, loaded)
    _check_keys(request, [key for key, origin in loaded.origins.items() if origin == "override" and key not in code])
    key = signing_key(loaded.config.run.key_file)
    if key is not None and is_new:  # the key is only known now, and the state hasn't been used yet
        signed_checkpoint = store.load(checkpoint.path, key=key)
        if signed_checkpoint.snapshot.state != checkpoint.snapshot.state:
            raise UsageError(f"{checkpoint.path}: changed while it was read; try again")
        checkpoint = checkpoint._replace(snapshot=signed_checkpoint.snapshot)
    return checkpoint, loaded


def check_code(request: EvalRequest, loaded: Loaded) -> Mapping[str, str]:
    """Return the code that the recipe names, by key. Raises UsageError unless the user also names or trusts the code.

    Without this check, the author of the folder could run any code.
    """
    recipe = loaded.config.recipe
    # In a timm model name, a colon separates the download location, so the name isn't an import path.
    model = {"model": recipe.model.name} if ":" in recipe.model.name else {}
    paths = {section: name for section, name in import_paths(recipe).items() if not section.startswith("metrics.")}
    keys = {_key(section): name for section, name in {**model, **paths}.items()}
    keys |= {"recipe.metrics": flow(recipe.metrics)} if recipe.metrics else {}
    untrusted = [f"{key}={name}" for key, name in keys.items() if loaded.origins[key] != "override"]
    if untrusted and not request.trust:
        words = " ".join(map(shlex.quote, untrusted))
        raise UsageError(
            f"{request.path}: its recipe names code, which would run with your permissions: {words}; to run this code, "
            f"add these overrides to your command, or pass --trust (from Python, trust=True)"
        )
    return keys


def _check_keys(request: EvalRequest, overridden: Sequence[str]) -> None:
    """Raise UsageError for overridden keys that the command ignores.

    These are training keys and, except for `lockstep eval`, all placement keys other than `device`.
    """
    is_local = request.command != "eval"  # whether the command runs in this process
    for key in overridden:
        is_unused = key.startswith(_TRAINING_PREFIXES) or (
            is_local and key.startswith("placement.") and key != "placement.device"
        )
        if is_unused and key != "run.key_file":
            raise UsageError(f"{key}: not used by lockstep {request.command}; remove it")


def _check_run(checkpoint: store.FoundCheckpoint) -> None:
    """Raise UsageError if the checkpoint is in the folder of a run with a different recipe."""
    config = checkpoint.path.parent.parent / CONFIG
    if not os.path.lexists(config):
        return
    run, own_recipe = (
        values(read_run_recipe(config)),
        values(checkpoint_recipe(checkpoint.path, checkpoint.snapshot)),
    )
    if comparable(run) != comparable(own_recipe):
        lines = [line.replace(" in the run,", " there,").removesuffix(" now") for line in differences(run, own_recipe)]
        raise UsageError(
            "\n".join(
                [f"{checkpoint.path}: does not belong to the run of {config}; move it to a separate folder:", *lines]
            )
        )


def _key(section: str) -> str:
    return "recipe.data.collate" if section == "collate" else f"recipe.{section}.name"


def _prepare(loaded: Loaded, checkpoint: store.FoundCheckpoint | None, processes: int | None = None) -> PreparedRun:
    """Open and check the recipe. If `checkpoint` is None, the recipe must specify the weights to evaluate."""
    if checkpoint is None:
        placed = place(loaded, processes, training=False)
        model = placed.resolved.recipe.model
        if placed.first is None and not model.pretrained:
            raise UsageError(
                f"model {model.name}: the recipe names no weights to evaluate; set recipe.model.weights=FILE or "
                f"recipe.model.pretrained=true, or pass a run folder instead of the recipe"
            )
    else:
        placed = Placed(check(loaded, processes, training=False))
    prepared = placed.open(training=False)
    if prepared.ready.data.validation is None:
        raise UsageError(
            f"dataset {loaded.config.recipe.data.name}: has no validation split, so there is nothing to evaluate; add "
            f"a validation split"
        )
    return prepared


def _evaluate_as(request: EvalRequest, report: ReportResult, opened: Opened | None, rendezvous: Rendezvous) -> int:
    checkpoint, loaded = open_checkpoint(request, opened[0] if opened else None)
    return _on_rank(loaded, checkpoint, report, opened[1] if opened else None, rendezvous)


def _on_rank(
    loaded: Loaded,
    checkpoint: store.FoundCheckpoint | None,
    report: ReportResult,
    prepared: PreparedRun | None,
    rendezvous: Rendezvous,
) -> int:
    """Evaluate a checkpoint, or the initial weights of the recipe. All ranks call it after they have joined."""
    recipe, placement = loaded.config.recipe, loaded.config.placement
    weights = {} if checkpoint is None else {"weights": store.weights_sha256(checkpoint.snapshot.model)}
    with open_recipe_rank(rendezvous, loaded, weights) as session:
        prepared = prepared or _prepare(loaded, checkpoint, rendezvous.info.size)
        ready = prepared.ready
        progress = (
            Progress() if checkpoint is None else checked_state(checkpoint.path, checkpoint.snapshot, ready).progress
        )
        rendezvous.compare(setup_facts(ready))
        with session.open_world() as world:
            if placement.affinity == "auto":
                bind(world, recipe.threads)
            engine, loader = start_engine(prepared, world)
            if checkpoint is not None:
                # The saved optimizer state isn't loaded, because an evaluation doesn't use the optimizer.
                engine.load(replace(engine_state(checkpoint.snapshot), optimizer={}, scalars=engine.state().scalars))
            model = (
                checkpoint.snapshot.model
                if checkpoint is not None
                else gather_full_tensors(world, engine.state().model)
            )
            sha256 = store.weights_sha256(model)
            rendezvous.status = lambda: RankStatus("evaluating", progress.step)
            event = evaluation_event(engine, world, ready, loader, progress)
            engine.close()
    if rendezvous.info.rank == 0:
        weights_config = recipe.model.weights
        weights_name = loaded.name if weights_config is None or weights_config.path is None else weights_config.path
        report(EvalResult(Path(weights_name) if checkpoint is None else checkpoint.path, event, sha256))
    return EXIT_DONE
