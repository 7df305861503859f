"""Implements `lockstep eval`: loads a checkpoint or the initial weights of a recipe, and evaluates the model."""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from lockstep.common.rank import RankInfo
from lockstep.config.base import section_to_dict
from lockstep.config.load import (
    LoadedConfig,
    list_recipe_differences,
    load_text,
    read_run_recipe,
    select_comparable_values,
)
from lockstep.config.placement import Placement
from lockstep.config.recipe import TRAINING_KEYS
from lockstep.config.recorded import CONFIG_NAME
from lockstep.config.write import format_flow
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.parallel.layouts.base import gather_full_tensors
from lockstep.ranks.affinity import bind_to_gpu_cores
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import RankStatus
from lockstep.run.checkpoints import get_engine_state
from lockstep.run.events import make_evaluation_event
from lockstep.run.session import open_recipe_rank
from lockstep.run.start import RankFunction, run_on_ranks
from lockstep.runs.folder import print_message
from lockstep.runs.remote import make_local_copy
from lockstep.setup.dataset_info import collect_values_to_compare
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import PreparedConfig, PreparedRun, check_config, prepare_config
from lockstep.setup.resume import get_checkpoint_recipe, get_evaluation_state
from lockstep.setup.user_code import get_import_paths
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.signing import read_signing_key
from lockstep.training.events import Evaluated
from lockstep.training.progress import Progress

# Prefixes of the keys that only apply to training.
_TRAINING_PREFIXES: Final = ("run.", *(f"recipe.{key}" for key in TRAINING_KEYS))


@dataclass(frozen=True)
class EvalRequest:
    """A request to evaluate a saved run.

    - `path`: A checkpoint or a run folder.
    - `overrides`: Overrides of the run's configuration.
    - `trust`: Whether to run user code that the run's recipe references.
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
OpenedCheckpoint = tuple[store.FoundCheckpoint, PreparedRun]


def evaluate_here(request: EvalRequest, report: ReportResult) -> int:
    """Run all checks in this process, then evaluate in this process or in new processes. Return the exit code."""
    torch.set_num_threads(1)  # forked workers must not inherit a thread pool
    checkpoint, loaded = open_checkpoint(request)
    for note in loaded.notes:
        print_message(f"note: {note}")
    prepared = _prepare_evaluation(loaded, checkpoint)
    _check_run(checkpoint)
    get_evaluation_state(checkpoint.path, checkpoint.snapshot, prepared.setup)
    for problem in checkpoint.problems:
        print_message(f"warning: {problem}")
    return run_on_ranks(
        partial(_evaluate_checkpoint_on_rank, request, report),
        (checkpoint, prepared),
        prepared.placement,
        prepared.processes,
    )


def evaluate_weights(loaded: LoadedConfig, report: ReportResult) -> int:
    """Evaluate the initial weights of a recipe in this process or in new processes. Return the exit code."""
    torch.set_num_threads(1)  # forked workers must not inherit a thread pool
    for note in loaded.notes:
        print_message(f"note: {note}")
    prepared = _prepare_evaluation(loaded, None)
    return run_on_ranks(
        partial(_evaluate_on_rank, loaded, None, report), prepared, prepared.placement, prepared.processes
    )


def prepare_weights_rank(loaded: LoadedConfig, report: ReportResult) -> tuple[Placement, RankFunction]:
    """Return the placement, and the function that evaluates initial weights on a rank started by a launcher."""
    return loaded.config.placement, partial(_evaluate_on_rank, loaded, None, report, None)


def prepare_evaluation_rank(
    request: EvalRequest, info: RankInfo, report: ReportResult
) -> tuple[Placement, RankFunction]:
    """Return the placement, and the function that evaluates a checkpoint on a rank started by a launcher.

    Runs the checks that are possible before the ranks join.
    """
    _, loaded = open_checkpoint(request)
    for note in loaded.notes if info.rank == 0 else ():
        print_message(f"note: {note}")
    return loaded.config.placement, partial(_evaluate_checkpoint_on_rank, request, report, None)


def open_checkpoint(
    request: EvalRequest, checkpoint: store.FoundCheckpoint | None = None
) -> tuple[store.FoundCheckpoint, LoadedConfig]:
    """Return the requested checkpoint and its configuration for an evaluation.

    If `checkpoint` is None, it is loaded first. If the run folder contains a config.yaml, the location of the dataset
    is taken from it. Raises UsageError if the recipe references untrusted user code, or if the command would ignore an
    override.
    """
    if request.command == "eval" and Path(request.path).is_file():
        raise UsageError(
            f"{request.path}: is a file; pass a run folder or a checkpoint, or evaluate weights with their recipe: "
            f"lockstep eval RECIPE recipe.model.weights={shlex.quote(request.path)}"
        )
    is_new = checkpoint is None
    prefer: Literal["newest", "best"] = "best" if request.best else "newest"
    checkpoint = checkpoint or store.load(make_local_copy(request.path, prefer), prefer)
    recipe = section_to_dict(get_checkpoint_recipe(checkpoint.path, checkpoint.snapshot))
    recipe["model"]["pretrained"] = False  # not loaded, because the checkpoint contains all weights
    config_path = checkpoint.path.parent.parent / CONFIG_NAME
    if os.path.lexists(config_path):
        data = read_run_recipe(config_path).data
        recipe["data"] |= {"root": data.root, "download": data.download}
    label, text = str(checkpoint.path / store.STATE), json.dumps({"recipe": recipe})
    loaded = load_text(text, label, checkpoint.path.name, request.overrides, splits_steps=False)
    code = check_user_code(request, loaded)
    _check_keys(request, [key for key, origin in loaded.origins.items() if origin == "override" and key not in code])
    key = read_signing_key(loaded.config.run.key_file)
    if key is not None and is_new:  # the checkpoint had to be loaded first, because it contains the path of the key
        signed_checkpoint = store.load(checkpoint.path, key=key)
        if signed_checkpoint.snapshot.state != checkpoint.snapshot.state:
            raise UsageError(f"{checkpoint.path}: changed while it was read; try again")
        checkpoint = checkpoint._replace(snapshot=signed_checkpoint.snapshot)
    return checkpoint, loaded


def check_user_code(request: EvalRequest, loaded: LoadedConfig) -> Mapping[str, str]:
    """Return the import paths of user code in the recipe, by key.

    Raises UsageError unless the request trusts the code or overrides each of these keys. Otherwise, the author of the
    folder could run any code with the permissions of the user.
    """
    recipe = loaded.config.recipe
    # A model name with a colon can also be a timm name with a download location, which isn't an import path.
    model = {"model": recipe.model.name} if ":" in recipe.model.name else {}
    paths = {section: name for section, name in get_import_paths(recipe).items() if not section.startswith("metrics.")}
    keys = {_format_section_key(section): name for section, name in {**model, **paths}.items()}
    keys |= {"recipe.metrics": format_flow(recipe.metrics)} if recipe.metrics else {}
    untrusted = [f"{key}={name}" for key, name in keys.items() if loaded.origins[key] != "override"]
    if untrusted and not request.trust:
        words = " ".join(map(shlex.quote, untrusted))
        raise UsageError(
            f"{request.path}: its recipe references code, which would run with your permissions: {words}; to run this "
            f"code, add these overrides to your command, or pass --trust (from Python, trust=True)"
        )
    return keys


def _check_keys(request: EvalRequest, overridden_keys: Sequence[str]) -> None:
    """Raise UsageError if the command would ignore one of the overridden keys.

    Every command with an EvalRequest ignores training keys, and the source of the initial weights. Only `lockstep eval`
    uses placement keys other than `placement.device`.
    """
    is_local = request.command != "eval"  # whether the command runs in this process
    for key in overridden_keys:
        is_unused = key.startswith(_TRAINING_PREFIXES) or (
            is_local and key.startswith("placement.") and key != "placement.device"
        )
        if is_unused and key != "run.key_file":
            raise UsageError(f"{key}: not used by lockstep {request.command}; remove it")


def _check_run(checkpoint: store.FoundCheckpoint) -> None:
    """Raise UsageError if the checkpoint is in the folder of a run with a different recipe."""
    config_path = checkpoint.path.parent.parent / CONFIG_NAME
    if not os.path.lexists(config_path):
        return
    run, checkpoint_recipe_values = (
        section_to_dict(read_run_recipe(config_path)),
        section_to_dict(get_checkpoint_recipe(checkpoint.path, checkpoint.snapshot)),
    )
    if select_comparable_values(run) != select_comparable_values(checkpoint_recipe_values):
        lines = [
            line.replace(" in the run,", " there,").removesuffix(" now")
            for line in list_recipe_differences(run, checkpoint_recipe_values)
        ]
        raise UsageError(
            "\n".join(
                [
                    f"{checkpoint.path}: does not belong to the run of {config_path}; move it to a separate folder:",
                    *lines,
                ]
            )
        )


def _format_section_key(section: str) -> str:
    return "recipe.data.collate" if section == "collate" else f"recipe.{section}.name"


def _prepare_evaluation(
    loaded: LoadedConfig, checkpoint: store.FoundCheckpoint | None, processes: int | None = None
) -> PreparedRun:
    """Check the recipe and open its dataset. If `checkpoint` is None, the recipe must have initial weights."""
    if checkpoint is None:
        prepared_config = prepare_config(loaded, processes, training=False)
        model = prepared_config.resolved.recipe.model
        if prepared_config.initial_weights is None and not model.pretrained:
            raise UsageError(
                f"model {model.name}: the recipe has no weights to evaluate; set recipe.model.weights=FILE or "
                f"recipe.model.pretrained=true, or pass a run folder instead of the recipe"
            )
    else:
        prepared_config = PreparedConfig(check_config(loaded, processes, training=False))
    prepared = prepared_config.open(training=False)
    if prepared.setup.data.validation is None:
        raise UsageError(
            f"dataset {loaded.config.recipe.data.name}: has no validation split, so there is nothing to evaluate; add "
            f"a validation split"
        )
    return prepared


def _evaluate_checkpoint_on_rank(
    request: EvalRequest, report: ReportResult, opened: OpenedCheckpoint | None, rendezvous: Rendezvous
) -> int:
    checkpoint, loaded = open_checkpoint(request, opened[0] if opened else None)
    return _evaluate_on_rank(loaded, checkpoint, report, opened[1] if opened else None, rendezvous)


def _evaluate_on_rank(
    loaded: LoadedConfig,
    checkpoint: store.FoundCheckpoint | None,
    report: ReportResult,
    prepared: PreparedRun | None,
    rendezvous: Rendezvous,
) -> int:
    """Evaluate a checkpoint, or the initial weights of the recipe if `checkpoint` is None. Return the exit code.

    All ranks call it after they have joined. Rank 0 calls `report`.
    """
    recipe, placement = loaded.config.recipe, loaded.config.placement
    weights = {} if checkpoint is None else {"weights": store.weights_sha256(checkpoint.snapshot.model)}
    with open_recipe_rank(rendezvous, loaded, weights) as session:
        prepared = prepared or _prepare_evaluation(loaded, checkpoint, rendezvous.info.size)
        ready = prepared.setup
        progress = (
            Progress()
            if checkpoint is None
            else get_evaluation_state(checkpoint.path, checkpoint.snapshot, ready).progress
        )
        rendezvous.compare(collect_values_to_compare(ready))
        with session.open_world() as world:
            if placement.affinity == "auto":
                bind_to_gpu_cores(world, recipe.threads)
            engine, loader = start_engine(prepared, world)
            if checkpoint is not None:
                # The saved optimizer state isn't loaded, because an evaluation doesn't use the optimizer.
                engine.load(
                    replace(get_engine_state(checkpoint.snapshot), optimizer={}, scalars=engine.state().scalars)
                )
            model = (
                checkpoint.snapshot.model
                if checkpoint is not None
                else gather_full_tensors(world, engine.state().model)
            )
            sha256 = store.weights_sha256(model)
            rendezvous.get_status = lambda: RankStatus("evaluating", progress.step)
            event = make_evaluation_event(engine, world, ready, loader, progress)
            engine.close()
    if rendezvous.info.rank == 0:
        weights_config = recipe.model.weights
        weights_name = loaded.name if weights_config is None or weights_config.path is None else weights_config.path
        report(EvalResult(Path(weights_name) if checkpoint is None else checkpoint.path, event, sha256))
    return EXIT_DONE
