"""Loads the initial weights of a run from a file or a different run, instead of generating them from the seed.

The recipe records the SHA-256 of the tensors but not their location, and a resumed run doesn't need their source. Only
tensors and JSON are read, so no code in a file or run folder is executed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from lockstep.config import load as loading
from lockstep.config.load import LoadedConfig
from lockstep.config.recipe import Recipe, StartingPoint, WeightsConfig
from lockstep.config.recorded import CONFIG_NAME
from lockstep.config.run import RunConfig, StartFromConfig
from lockstep.core.shard import get_local_tensor
from lockstep.errors import ConfigError, TrainingError, UsageError, convert_error
from lockstep.models.adapters import has_adapters
from lockstep.models.match_state import MatchReport, copy_matching_tensors
from lockstep.models.statefiles import read_tensors, strip_prefix
from lockstep.runs.remote import fetch_file, make_local_copy
from lockstep.tasks.dataset_properties import OUTPUT_PROPERTIES
from lockstep.training.checkpoint import saved_state, store
from lockstep.training.checkpoint.saved_state import SavedState
from lockstep.training.checkpoint.signing import read_key
from lockstep.training.checkpoint.store import FoundCheckpoint

_WEIGHTS: Final = "recipe.model.weights"
_START: Final = "run.start_from"


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights by parameter name, and their source.

    - `label`: the path of the source, for messages.
    - `fresh_patterns`: patterns of the parameters that keep their random initialization.
    - `checkpoint`: the checkpoint that contains the weights, if they come from a run.
    - `uses_optimizer_state`: whether to also use the optimizer state of the checkpoint.
    """

    label: str
    tensors: Mapping[str, Tensor]
    fresh_patterns: Sequence[str] = ()
    checkpoint: FoundCheckpoint | None = None
    uses_optimizer_state: bool = False

    def load_into(self, model: nn.Module) -> MatchReport:
        """Copy the weights into `model`, and return a report of which weights and parameters matched.

        Raises UsageError if the weights don't match the model.
        """
        return copy_matching_tensors(model, self.tensors, self.label, self.fresh_patterns)

    @property
    def has_adapters(self) -> bool:
        """Whether the weights come from a model with adapters (models/adapters.py)."""
        return has_adapters(self.tensors)

    @property
    def saved_state(self) -> SavedState | None:
        """The state of the checkpoint, or None if the weights don't come from a run."""
        return (
            None
            if self.checkpoint is None
            else saved_state.parse_state(self.checkpoint.path, self.checkpoint.snapshot.state)
        )

    @property
    def output_info(self) -> Mapping[str, Any]:
        """The dataset properties that determine the last layer. Empty if unknown, or if `fresh_patterns` is set."""
        facts = self.saved_state.data if self.saved_state is not None and not self.fresh_patterns else None
        return {name: value for name, value in (facts or {}).items() if name in OUTPUT_PROPERTIES and value is not None}


def load_initial_weights(loaded: LoadedConfig) -> tuple[LoadedConfig, InitialWeights | None]:
    """Load the initial weights of a configuration.

    Returns the configuration, with the hashes of the weights added to its recipe, and the weights. The weights are None
    if the configuration specifies none, or if their source no longer exists but the run folder contains a run that
    started from it. Raises UsageError if the weights can't be read or don't match the recipe.
    """
    recipe, run = loaded.config.recipe, loaded.config.run
    weights, start_from = recipe.model.weights, run.start_from
    if weights is not None and (start_from is not None or recipe.model.pretrained):
        other_key = _START if start_from is not None else "recipe.model.pretrained"
        raise UsageError(f"{_WEIGHTS}: {other_key} also sets the initial weights; set only one of the two")
    previous_recipe = _read_previous_recipe(run) if weights or start_from or recipe.start else None
    if weights is not None:
        return _load_from_file(loaded, weights, previous_recipe)
    if start_from is not None:
        return _load_from_run(loaded, start_from, previous_recipe)
    if recipe.start is not None and (previous_recipe is None or previous_recipe.start != recipe.start):
        raise UsageError(
            f"recipe.start: contains the hash of the initial weights of a run, but not their location; set {_START} to "
            f"the run that they come from"
        )
    return loaded, None


def make_weights_record(
    recipe: Recipe, initial_weights: InitialWeights | None, match_report: MatchReport | None
) -> dict[str, Any]:
    """Return the record of the initial weights for environment.json, or {} if they are generated from the seed."""
    weights, start = recipe.model.weights, recipe.start
    sha256 = weights.sha256 if weights is not None else start.weights_sha256 if start is not None else None
    if sha256 is None:
        return {}
    if initial_weights is None or match_report is None:
        return {"sha256": sha256}
    return {
        "sha256": sha256,
        "from": initial_weights.label,
        "as initialised": [*match_report.initialized],
        "not used": [*match_report.unused],
    }


def _load_from_file(
    loaded: LoadedConfig, weights_config: WeightsConfig, previous_recipe: Recipe | None
) -> tuple[LoadedConfig, InitialWeights | None]:
    previous = previous_recipe.model.weights if previous_recipe is not None else None
    if weights_config.path is None or not Path(weights_config.path).exists():
        if previous is not None and previous.sha256 is not None and weights_config.path in (None, previous.path):
            return _record_hashes(loaded, weights=weights_config.model_copy(update={"sha256": previous.sha256})), None
        if weights_config.path is None:
            raise UsageError(
                f"{_WEIGHTS}.path: missing; set it to a file of tensors, a folder with such a file, or a run"
            )
    path = Path(weights_config.path)
    is_run = (path / store.FOLDER).is_dir() or (path / store.MANIFEST).is_file()
    checkpoint = _load_checkpoint(path, loaded.config.run) if is_run else None
    if checkpoint is None and weights_config.ema:
        raise UsageError(f"{_WEIGHTS}.ema: {path} is not a run of Lockstep; unset {_WEIGHTS}.ema")
    tensors = read_tensors(path) if checkpoint is None else _get_checkpoint_tensors(checkpoint, weights_config.ema)
    advice = "; save its tensors in a common dtype"
    with convert_error(UsageError, (ValueError, RuntimeError), f"{path}: cannot be used", advice):
        sha256 = store.weights_sha256(tensors)
    if weights_config.sha256 not in (None, sha256):
        raise UsageError(
            f"{_WEIGHTS}: expected tensors with SHA-256 {weights_config.sha256}, but {path} has {sha256}; use the "
            f"expected tensors, or unset {_WEIGHTS}.sha256"
        )
    named_tensors = strip_prefix(tensors, str(path), weights_config.prefix or "")
    updated = _record_hashes(loaded, weights=weights_config.model_copy(update={"sha256": sha256}))
    return updated, InitialWeights(str(path), named_tensors, weights_config.fresh, checkpoint)


def _load_from_run(
    loaded: LoadedConfig, start_config: StartFromConfig, previous_recipe: Recipe | None
) -> tuple[LoadedConfig, InitialWeights | None]:
    path, recipe = make_local_copy(start_config.run), loaded.config.recipe
    if not path.exists() and previous_recipe is not None and previous_recipe.start is not None:
        return _record_hashes(loaded, start=previous_recipe.start), None
    checkpoint = _load_checkpoint(path, loaded.config.run)
    start = _make_starting_point(checkpoint, start_config.optimizer)
    if recipe.start not in (None, start):
        raise UsageError(
            f"{_START}: {checkpoint.path} (weights with SHA-256 {start.weights_sha256}"
            f"{', and its optimizer' if start_config.optimizer else ''}) does not match recipe.start; use a different "
            f"checkpoint, or unset recipe.start"
        )
    initial_weights = InitialWeights(
        str(checkpoint.path),
        _get_checkpoint_tensors(checkpoint, use_ema=False),
        checkpoint=checkpoint,
        uses_optimizer_state=start_config.optimizer,
    )
    return _record_hashes(loaded, start=start), initial_weights


def _make_starting_point(checkpoint: FoundCheckpoint, with_optimizer: bool) -> StartingPoint:
    snapshot = checkpoint.snapshot
    weights = store.weights_sha256(snapshot.model)
    if not with_optimizer:
        return StartingPoint(weights_sha256=weights)
    state = saved_state.parse_state(checkpoint.path, snapshot.state)
    previous_start = state.recipe.get("start") or {}
    updates = state.progress.step - state.progress.skipped_steps + int(previous_start.get("updates") or 0)
    parts = [store.weights_sha256(snapshot.optimizer), store.weights_sha256(snapshot.ema or {})]
    digest = hashlib.sha256(json.dumps([*parts, snapshot.state["engine"]], sort_keys=True).encode()).hexdigest()
    return StartingPoint(weights_sha256=weights, optimizer_sha256=digest, updates=updates)


def _load_checkpoint(path: Path, run_config: RunConfig) -> FoundCheckpoint:
    key = read_key(Path(run_config.key_file)) if run_config.key_file is not None else None
    try:
        return store.load(path, key=key)
    except TrainingError as error:  # a damaged checkpoint that the user chose is a usage error
        raise UsageError(str(error)) from error


def _get_checkpoint_tensors(checkpoint: FoundCheckpoint, use_ema: bool) -> dict[str, Tensor]:
    snapshot = checkpoint.snapshot
    if use_ema and snapshot.ema is None:
        raise UsageError(f"{_WEIGHTS}.ema: {checkpoint.path} has no averaged weights; unset {_WEIGHTS}.ema")
    tensors = snapshot.ema if use_ema and snapshot.ema is not None else snapshot.model
    return {name: get_local_tensor(tensor) for name, tensor in tensors.items()}


def _read_previous_recipe(run: RunConfig) -> Recipe | None:
    """Return the recipe of the run to resume, or None if there is no such run or its recipe is unreadable."""
    if run.dir is None or run.resume == "never":
        return None
    try:
        return loading.read_run_recipe(fetch_file(run.dir, CONFIG_NAME))
    except ConfigError:  # reported when the run folder is claimed
        return None


def _record_hashes(
    loaded: LoadedConfig, weights: WeightsConfig | None = None, start: StartingPoint | None = None
) -> LoadedConfig:
    """Return a copy of the configuration whose recipe records the hashes of the initial weights."""
    config = loaded.config
    model = config.recipe.model if weights is None else config.recipe.model.model_copy(update={"weights": weights})
    recipe = config.recipe.model_copy(update={"model": model} if start is None else {"start": start})
    origins = {f"recipe.start.{name}": "run.start_from" for name in StartingPoint.model_fields}
    origins |= {"recipe.model.weights.sha256": "its tensors"}
    return replace(
        loaded, config=config.model_copy(update={"recipe": recipe}), origins={**origins, **dict(loaded.origins)}
    )
