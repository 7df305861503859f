"""Checks that a checkpoint belongs to a run: that its recipe, its progress and the rest of its state match.

The hashes of a checkpoint detect damage, but not that the checkpoint is forged or belongs to a different run.
Therefore, Lockstep compares everything that the recipe determines: the name, shape and dtype of each tensor, the scalar
state of the optimizer, and the loss scale. The values of trained tensors can't be checked in this way. To protect them
against changes, use run.key_file (docs/security.md).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import Parameter

from lockstep.config import load as loading
from lockstep.config.base import section_to_dict
from lockstep.config.load import select_comparable_values
from lockstep.config.recipe import Recipe
from lockstep.config.recorded import CONFIG_NAME, format_resume_command
from lockstep.core.precision import SCALED_PRECISIONS
from lockstep.core.shard import get_local_tensor
from lockstep.device.precision import make_loss_scaler
from lockstep.errors import UsageError
from lockstep.models.check import TensorSpec
from lockstep.parallel.engine import State
from lockstep.parallel.layerwise import compute_full_norms
from lockstep.parallel.optimizer_state import get_optimizer_state
from lockstep.parallel.optimizer_step import store_lr_ratios
from lockstep.setup.build import Setup
from lockstep.setup.dataset_info import check_dataset_info
from lockstep.training.checkpoint import saved_state
from lockstep.training.checkpoint.saved_state import SavedOptimizer, SavedState
from lockstep.training.checkpoint.store import Snapshot

_MAX_PROBLEMS: Final = 8  # maximum number of problems listed for a checkpoint


def list_recipe_differences(saved: Recipe, current: Recipe) -> list[str]:
    """Return a description of each key that differs between two recipes, ignoring the location of the dataset."""
    return loading.list_recipe_differences(
        select_comparable_values(section_to_dict(saved)), select_comparable_values(section_to_dict(current))
    )


def check_recipe(path: Path, saved: Recipe, current: Recipe) -> None:
    """Raise UsageError with all differing keys if `saved`, the recipe of the run at `path`, differs from `current`."""
    lines = list_recipe_differences(saved, current)
    if not lines:
        return
    if (path / CONFIG_NAME).exists():  # a run folder, not a checkpoint
        lines.append(f"to continue that run: {format_resume_command(path)}")
    if (saved.epochs, saved.steps) != (current.epochs, current.steps):
        lines.append("to start a longer run from its weights: set run.start_from to that run, and choose a new run.dir")
    raise UsageError(
        "\n".join(
            [f"{path}: contains a run of a different recipe; choose a different run.dir, or undo the changes:", *lines]
        )
    )


def get_checkpoint_recipe(path: Path, snapshot: Snapshot) -> Recipe:
    """Return the recipe of the checkpoint at `path`. Raises UsageError if the recipe is missing or invalid."""
    recipe = saved_state.parse_state(path, snapshot.state).recipe
    if "loop" in recipe:
        raise UsageError(
            f"{path}: is a checkpoint of a custom loop and has no recipe; run its script to resume it, or load its "
            f"model with lockstep.load(..., model=...)"
        )
    try:
        return Recipe.model_validate(recipe)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:_MAX_PROBLEMS]
        ]
        raise UsageError("\n".join([f"{path}: its recipe is not valid in this version:", *lines])) from None


def get_resume_state(path: Path, snapshot: Snapshot, setup: Setup) -> SavedState:
    """Return the saved state to resume a run from. Raises UsageError if the checkpoint doesn't belong to the run."""
    check_recipe(path, get_checkpoint_recipe(path, snapshot), setup.recipe)
    state = get_evaluation_state(path, snapshot, setup)
    start = setup.recipe.start
    before = start.updates or 0 if start is not None else 0
    updates = before + state.progress.step - state.progress.skipped_steps
    problems = [
        *_find_optimizer_problems(snapshot.optimizer, state, setup, updates),
        *_find_loss_scale_problems(state, setup),
        *_find_feedback_problems(snapshot.feedback or {}, setup),
    ]
    _raise_on_problems(path, problems)
    return state


def get_evaluation_state(path: Path, snapshot: Snapshot, setup: Setup) -> SavedState:
    """Return the saved state for an evaluation. Raises UsageError if the checkpoint doesn't belong to the recipe.

    Unlike `get_resume_state`, this function doesn't check the optimizer state, which evaluations don't use.
    """
    state, recipe = saved_state.parse_state(path, snapshot.state), setup.recipe
    check_dataset_info(setup.data.facts, state.data, path)
    may_skip = recipe.nonfinite == "skip" or recipe.precision in SCALED_PRECISIONS or not setup.task.counts_samples
    problems = [
        *saved_state.find_progress_problems(state.progress, setup.steps, setup.task, may_skip),
        *_find_spec_problems("model", _get_tensor_specs(snapshot.model), setup.summary.tensors),
        *_find_averaging_problems(snapshot, setup),
    ]
    _raise_on_problems(path, problems)
    return state


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise UsageError if the names or shapes of a checkpoint's tensors don't match a model."""
    # Ignore the dtypes, because averaged weights may have a wider dtype.
    dtypes = {name: tensors.get(name, tensor).dtype for name, tensor in expected.items()}
    specs = {name: TensorSpec(tuple(tensor.shape), dtypes[name]) for name, tensor in expected.items()}
    _raise_on_problems(path, list(_find_spec_problems("model", _get_tensor_specs(tensors), specs)))


def list_feedback_warnings(snapshot: Snapshot, current: State) -> list[str]:
    """Return a list that contains a warning if this placement discards the error feedback of a checkpoint."""
    if snapshot.feedback is None or current.feedback is not None:
        return []
    return [
        "the checkpoint contains the error feedback of compress=powersgd, i.e. the part of the gradients that has not "
        "been sent yet; this placement does not use it, so the run continues without it"
    ]


def check_initial_weights(setup: Setup) -> None:
    """Raise UsageError if the dataset or the optimizer doesn't match the checkpoint with the initial weights."""
    initial_weights = setup.initial_weights
    if initial_weights is None or initial_weights.checkpoint is None or initial_weights.saved_state is None:
        return
    check_dataset_info(setup.data.facts, initial_weights.output_info, initial_weights.checkpoint.path)
    if initial_weights.uses_optimizer_state:
        tensors, saved_optimizer = (
            initial_weights.checkpoint.snapshot.optimizer,
            initial_weights.saved_state.engine.optimizer,
        )
        problems = list(
            _find_optimizer_spec_problems(tensors, saved_optimizer, *_make_optimizer_state(setup, num_steps=1))
        )
        if problems:
            text = (
                f"run.start_from: {initial_weights.checkpoint.path}: its optimizer does not match this recipe; set "
                f"run.start_from.optimizer=false to load only its weights:"
            )
            raise UsageError("\n".join([text, *problems[:_MAX_PROBLEMS]]))


def check_start(setup: Setup) -> None:
    """Raise UsageError if a run can't start because its initial weights are missing or its dataset is ambiguous."""
    recipe = setup.recipe
    if setup.data.question:
        raise UsageError(setup.data.question)
    if setup.initial_weights is None and (recipe.model.weights is not None or recipe.start is not None):
        raise UsageError(
            "initial weights: not found at the location that they were first loaded from, and the run saved no "
            "checkpoint; restore them, or choose a different run.dir"
        )


def make_continuation_state(setup: Setup, current: State) -> State:
    """Return the engine state for a new run that starts from the weights and the optimizer state of a previous run.

    `current` is the initial engine state of the new run. Counters in the optimizer's parameter groups are copied from
    the previous run. Settings such as the learning rate and the weight decay come from the recipe of the new run.
    """
    initial_weights = setup.initial_weights
    assert initial_weights is not None
    assert initial_weights.checkpoint is not None
    assert initial_weights.saved_state is not None
    snapshot, state = initial_weights.checkpoint.snapshot, initial_weights.saved_state
    optimizer = state.engine.optimizer
    _, state_before_step = _make_optimizer_state(setup, num_steps=0)
    _, state_after_step = _make_optimizer_state(setup, num_steps=1)
    groups = [
        {
            name: saved_group.get(name, value) if not _is_equal(value, last.get(name)) else value
            for name, value in before.items()
        }
        for saved_group, before, last in zip(
            optimizer.groups, state_before_step["groups"], state_after_step["groups"], strict=True
        )
    ]
    initial_scale = current.scalars["loss_scale"]
    is_dynamic = setup.recipe.loss_scale.static is None
    scale = (
        state.engine.loss_scale
        if is_dynamic and state.engine.loss_scale.keys() == initial_scale.keys()
        else initial_scale
    )
    return State(
        model=dict(snapshot.model),
        optimizer=dict(snapshot.optimizer),
        ema=None if snapshot.ema is None or current.ema is None else dict(snapshot.ema),
        scalars={"optimizer": {"slots": dict(optimizer.slots), "groups": groups}, "loss_scale": dict(scale)},
    )


def _raise_on_problems(path: Path, problems: Sequence[str]) -> None:
    if not problems:
        return
    remainder = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
    raise UsageError(
        "\n".join(
            [f"{path}: not a checkpoint of this run, although its hashes match:", *problems[:_MAX_PROBLEMS], *remainder]
        )
    )


def _get_tensor_specs(tensors: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(tuple(get_local_tensor(tensor).shape), get_local_tensor(tensor).dtype)
        for name, tensor in tensors.items()
    }


def _find_spec_problems(
    label: str, actual: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]
) -> Iterator[str]:
    yield from _find_name_problems(label, {*actual}, {*expected})
    for name in sorted(actual.keys() & expected.keys()):
        if actual[name] != expected[name]:
            yield f"{label}: {name} is {actual[name]}, but {expected[name]} in this run"


def _find_averaging_problems(snapshot: Snapshot, setup: Setup) -> Iterator[str]:
    if (snapshot.ema is None) != (setup.recipe.ema is None):
        yield f"averaged weights: {'missing' if snapshot.ema is None else 'not part of this run'}"
    elif snapshot.ema is not None:
        averages = {name: spec.get_average_spec() for name, spec in setup.summary.tensors.items()}
        yield from _find_spec_problems("averaged weights", _get_tensor_specs(snapshot.ema), averages)


def _find_feedback_problems(tensors: Mapping[str, Any], setup: Setup) -> Iterator[str]:
    """Yield the problems of the saved error feedback. Its tensors have one row per rank for each parameter."""
    for name, tensor in tensors.items():
        owner, _, slot = name.rpartition("/")
        shape = tuple(get_local_tensor(tensor).shape)
        spec = setup.summary.trained_parameters.get(owner)
        if spec is None or slot not in ("error", "factor"):
            yield f"feedback: {name} is not part of this run"
        elif slot == "error" and math.prod(shape[1:]) != math.prod(spec.shape):
            yield f"feedback: {name} has shape {shape}, but {owner} has shape {spec.shape} in this run"


def _find_optimizer_problems(
    tensors: Mapping[str, Any], state: SavedState, setup: Setup, num_updates: int
) -> Iterator[str]:
    """Yield the differences between the saved optimizer state and the state of a new optimizer.

    The new optimizer has parameters of the same shapes, and has made one update if the run has made any.
    """
    _, before = _make_optimizer_state(setup, num_steps=0)
    expected, after = _make_optimizer_state(setup, num_steps=min(num_updates, 1))
    optimizer = state.engine.optimizer
    yield from _find_optimizer_spec_problems(tensors, optimizer, expected, after)
    if len(optimizer.groups) != len(after["groups"]):
        return
    # A number in a parameter group that an update doesn't change comes from the recipe, so it must match. A number
    # may be missing, because the checkpoint may have been written by a version of torch that didn't have it.
    for index, (group, first, last) in enumerate(zip(optimizer.groups, before["groups"], after["groups"], strict=True)):
        label = f"optimizer: group {index}"
        yield from _find_name_problems(label, {*group}, {*group} & {*last})
        for name in sorted(group.keys() & last.keys()):
            if name in first and _is_equal(first[name], last[name]) and not _is_equal(group[name], last[name]):
                yield f"{label}: {name} is {group[name]}, but {last[name]} in this run"
    counts = {**_get_scalar_values(tensors), **_flatten_numbers(optimizer.slots, optimizer.groups)}
    yield from _find_count_problems(counts, expected, after, num_updates)


def _find_optimizer_spec_problems(
    tensors: Mapping[str, Any],
    optimizer: SavedOptimizer,
    expected: Mapping[str, Tensor],
    expected_state: Mapping[str, Any],
) -> Iterator[str]:
    """Yield the differences in the tensors, the slots and the number of parameter groups.

    `expected` contains the expected tensors, and `expected_state` the expected scalar state.
    """
    yield from _find_spec_problems("optimizer", _get_tensor_specs(tensors), _get_tensor_specs(expected))
    yield from _find_name_problems("optimizer", {*optimizer.slots}, {*expected_state["slots"]})
    if len(optimizer.groups) != len(expected_state["groups"]):
        yield f"optimizer: {len(optimizer.groups)} parameter groups, but {len(expected_state['groups'])} in this run"


def _find_count_problems(
    counts: Mapping[str, Any], expected: Mapping[str, Tensor], expected_state: Mapping[str, Any], num_updates: int
) -> Iterator[str]:
    """Yield each update counter of the optimizer that differs from the number of updates, and each non-finite number.

    A number is an update counter if it is named `step` and is 1 after the first update.
    """
    after_one_update = {
        **_get_scalar_values(expected),
        **_flatten_numbers(expected_state["slots"], expected_state["groups"]),
    }
    for name, value in sorted(counts.items()):
        if name.rpartition("/")[2] == "step" and after_one_update.get(name) == 1 and value != num_updates:
            yield f"optimizer: {name} is {value} after {num_updates} updates"
        elif value is not None and not math.isfinite(value):
            yield f"optimizer: {name} is {value}, which is not finite"


def _find_loss_scale_problems(state: SavedState, setup: Setup) -> Iterator[str]:
    recipe, saved_scale = setup.recipe, state.engine.loss_scale
    scale = recipe.loss_scale
    expected = make_loss_scaler(recipe.precision, scale, torch.device("cpu")).state_dict()
    yield from _find_name_problems("loss scale", {*saved_scale}, {*expected})
    if saved_scale.keys() != expected.keys() or not expected:
        return
    fixed = [name for name in expected if name not in ("scale", "_growth_tracker")]
    for name in fixed:
        if saved_scale[name] != expected[name]:
            yield f"loss scale: {name} is {saved_scale[name]}, but {expected[name]} in this run"
    if scale.static is not None:
        if (saved_scale["scale"], saved_scale["_growth_tracker"]) != (scale.static, 0):
            yield f"loss scale: {saved_scale['scale']}, but {scale.static} at each step of this run"
        return
    ratio = saved_scale["scale"] / scale.initial
    # The loss scale only changes by doubling and halving.
    if ratio <= 0 or not math.isfinite(ratio) or math.frexp(ratio)[0] != 0.5:
        yield f"loss scale: {saved_scale['scale']} is not {scale.initial} times a power of two"
    if saved_scale["_growth_tracker"] not in range(scale.growth_interval):
        most_steps = scale.growth_interval - 1
        yield f"loss scale: {saved_scale['_growth_tracker']} steps since it grew, but at most {most_steps} in this run"


def _find_name_problems(label: str, actual: set[str], expected: set[str]) -> Iterator[str]:
    yield from (f"{label}: {name} is not part of this run" for name in sorted(actual - expected))
    yield from (f"{label}: {name} is missing" for name in sorted(expected - actual))


def _is_equal(left: object, right: object) -> bool:
    return type(left) is type(right) and left == right


def _get_scalar_values(tensors: Mapping[str, Any]) -> dict[str, float]:
    tensors_by_name = {name: get_local_tensor(tensor) for name, tensor in tensors.items()}
    return {
        name: float(scalar)
        for name, scalar in tensors_by_name.items()
        if not scalar.ndim and scalar.device.type != "meta"
    }


def _flatten_numbers(slots: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all numbers of an optimizer state by name. Those in parameter groups have names such as `group 0/lr`."""
    group_numbers = {
        f"group {index}/{name}": value for index, group in enumerate(groups) for name, value in group.items()
    }
    return {**slots, **group_numbers}


def _make_optimizer_state(setup: Setup, num_steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the scalar state of a new optimizer after `num_steps` steps in which all gradients are 1.

    The optimizer runs on the meta device, or on the CPU if that fails.
    """
    try:
        return _make_optimizer_state_on(setup, num_steps, "meta")
    except Exception:  # some optimizers read tensor values in `step`, which fails on the meta device
        return _make_optimizer_state_on(setup, num_steps, "cpu")


def _make_optimizer_state_on(setup: Setup, num_steps: int, device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    trained = [
        (name, Parameter(torch.ones(spec.shape, dtype=spec.dtype, device=device)))
        for name, spec in setup.summary.trained_parameters.items()
    ]
    optimizer = setup.make_optimizer(trained, compute_full_norms)
    store_lr_ratios(optimizer)
    for _ in range(num_steps):
        for _, parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        cast(Any, optimizer).step()
    return get_optimizer_state(trained, optimizer)
