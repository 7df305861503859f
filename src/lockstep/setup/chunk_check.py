"""Checks that a model computes the same function in chunks as without chunks.

Feature chunks can change the outputs if a plan is valid but wrong. Sequence chunks can change them if a layer mixes
positions.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from lockstep.config.recipe import ModelConfig
from lockstep.core.batch import Batch, Inputs, call_model, get_tensors, map_tensors
from lockstep.core.several_losses import add_losses
from lockstep.core.shard import ChunkLayout
from lockstep.data.items import preserve_rng_states
from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.errors import UsageError, VerificationError
from lockstep.parallel.tensor.plan import find_region_names
from lockstep.setup.build import Setup
from lockstep.setup.chunking import chunk_model, compute_chunk_losses
from lockstep.setup.examples import load_example_batches, repeat_samples
from lockstep.tasks.base import Task

PLAN_ADVICE: Final = (
    "between a colwise and a rowwise layer, each feature or head must be computed independently: use colwise:2 for a "
    "layer whose outputs are split in two, such as the first layer of a GLU, use heads:NAMES for attributes that count "
    "heads, or do not split the layer"
)
# Maximum difference relative to the largest magnitude, by dtype. A different order of summation causes much smaller
# differences, and a different function causes much larger differences.
_BOUNDS: Final = {torch.float64: 2.0**-30, torch.float32: 2.0**-10}
_QUICK_BOUNDS: Final = {torch.float32: 2.0**-10}
_NUM_SAMPLES: Final = 2
_MAX_POSITIONS: Final = 64  # maximum length of integer sequences in a quick comparison
MAX_COMPARED_PARAMETERS: Final = (
    250_000_000  # maximum number of parameters, because a comparison copies the model twice
)

T = TypeVar("T")
Bounds = Mapping[torch.dtype, float]
ChunkDifference = tuple[str, float]  # the name of the module or value that differs, and the relative difference


def check_plan(setup: Setup) -> list[str]:
    """Compare the chunked model with the full model on two samples in float32, and return warnings.

    Raises UsageError with the name of the first layer that computes a different function in chunks.
    """
    config, parameters = setup.recipe.model, setup.summary.num_parameters
    if config.chunks == 1 and config.sequence_chunks == 1:
        return []
    if parameters > MAX_COMPARED_PARAMETERS:
        return [
            f"recipe.model: the model in chunks was not compared with the whole model, because the comparison would "
            f"copy {parameters:,} parameters twice; run `lockstep verify` to compare them"
        ]
    try:
        check_chunks(setup, quick=True)
        check_sequence_chunks(setup, _QUICK_BOUNDS)
    except VerificationError as error:
        raise UsageError(str(error)) from None
    return []


def check_chunks(setup: Setup, quick: bool = False) -> None:
    """Raise VerificationError if splitting the recipe's model into feature chunks changes its outputs.

    If `quick` is set, the model is only called with a part of the inputs, in float32.
    """
    config = setup.recipe.model
    if config.chunks == 1:
        return
    with preserve_rng_states(), drop_new_tensors():
        full_model = setup.build_unchunked().eval()
        _, batch = load_example_batches(setup.recipe, setup.data)
        inputs = setup.task.inputs(repeat_samples(batch, _NUM_SAMPLES))
        split_features = partial(chunk_model, num_chunks=config.chunks, plan=config.plan, model_name=config.name)
        difference = (find_quick_difference if quick else find_chunk_difference)(full_model, split_features, inputs)
    if difference:
        raise VerificationError(f"recipe.model.plan: {describe_difference(difference, config.chunks)}; {PLAN_ADVICE}")


def check_saved_model(path: Path, model: nn.Module, config: ModelConfig, inputs: Inputs) -> None:
    """Raise UsageError if a model that was trained in chunks computes a different function without chunks.

    Checkpoints of earlier versions can contain such a model, because `lockstep train` didn't check the plan. `model` is
    the full model of the checkpoint at `path`.
    """
    if config.chunks == 1:
        return
    split_features = partial(chunk_model, num_chunks=config.chunks, plan=config.plan, model_name=config.name)
    with preserve_rng_states(), drop_new_tensors():
        difference = find_quick_difference(copy.deepcopy(model), split_features, inputs)
    if difference:
        raise UsageError(
            f"{path}: recipe.model.plan: {describe_difference(difference, config.chunks)}, so the whole model does "
            "not match these weights, which were trained in chunks; use `lockstep eval`, which computes in chunks"
        )


def describe_difference(difference: ChunkDifference, num_chunks: int) -> str:
    """Return a message with the name of the module whose outputs differ, and the size of the difference."""
    return (
        f"{difference[0] or 'the model'} computes different outputs in {num_chunks} chunks than as a whole: they "
        f"differ by {difference[1]:.2g} of the largest value"
    )


def check_sequence_chunks(setup: Setup, bounds: Bounds = _BOUNDS) -> None:
    """Raise VerificationError if splitting sequences into chunks changes the loss or a gradient of the model."""
    config, name = setup.recipe.model, setup.problem.name
    if config.sequence_chunks == 1:
        return
    split_features = (
        partial(chunk_model, num_chunks=config.chunks, plan=config.plan, model_name=config.name)
        if config.chunks > 1
        else _split_no_features
    )
    with preserve_rng_states(), drop_new_tensors():
        example, _ = load_example_batches(setup.recipe, setup.data)
        batch = repeat_samples(example, _NUM_SAMPLES)
        full_model = setup.build_unchunked().eval()
        difference = find_sequence_difference(
            full_model, setup.task, batch, config.sequence_chunks, split_features, bounds
        )
    if difference:
        raise VerificationError(
            f"recipe.model.sequence_chunks: {name} computes different values in {config.sequence_chunks} chunks than "
            f"on whole sequences: {difference[0]} differs by {difference[1]:.2g} of the largest value; outside "
            f"attention, compute each position independently, using its position_ids, and do not convolve, pool or "
            f"shift along the sequence"
        )


def find_quick_difference(
    full_model: nn.Module,
    split_features: Callable[[nn.Module], object],
    inputs: T,
    run_model: Callable[[nn.Module, T], Any] = call_model,  # type: ignore[assignment]
) -> ChunkDifference | None:
    """Return the difference that `find_chunk_difference` finds in float32 on two samples with shortened sequences.

    If the model rejects the shortened samples, the comparison uses two full samples. If the model rejects these too,
    the comparison uses all inputs.
    """
    first = next(iter(get_tensors(inputs)), None)
    samples = len(first) if first is not None and first.ndim else 0

    def first_samples(tensor: Tensor) -> Tensor:
        return tensor[:_NUM_SAMPLES] if tensor.ndim and len(tensor) == samples else tensor

    def shortened_samples(tensor: Tensor) -> Tensor:
        sequence = tensor.ndim == 2 and not tensor.is_floating_point()
        return first_samples(tensor)[:, :_MAX_POSITIONS] if sequence else first_samples(tensor)

    for select in (shortened_samples, first_samples):
        try:
            return find_chunk_difference(
                full_model, split_features, map_tensors(select, inputs), run_model, _QUICK_BOUNDS
            )
        except Exception:  # a user's model may raise any exception
            continue
    return find_chunk_difference(full_model, split_features, inputs, run_model, _QUICK_BOUNDS)


def find_chunk_difference(
    full_model: nn.Module,
    split_features: Callable[[nn.Module], object],
    inputs: T,
    run_model: Callable[[nn.Module, T], Any] = call_model,  # type: ignore[assignment]
    bounds: Bounds = _BOUNDS,
) -> ChunkDifference | None:
    """Split a copy of `full_model` into chunks, and return the first difference. See `find_feature_difference`.

    A parameter that is all zeros, such as in a newly initialized last layer, could hide a difference. Therefore, such
    parameters are set to random values, which are the same in both models.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in full_model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.copy_(torch.empty(parameter.shape).normal_(std=0.1, generator=generator))
    chunked_model = copy.deepcopy(full_model)
    split_features(chunked_model)
    return find_feature_difference(full_model, chunked_model, inputs, run_model, bounds)


def find_feature_difference(
    full_model: nn.Module,
    chunked_model: nn.Module,
    inputs: T,
    run_model: Callable[[nn.Module, T], Any] = call_model,  # type: ignore[assignment]
    bounds: Bounds = _BOUNDS,
) -> ChunkDifference | None:
    """Return the name of the first chunked module whose outputs differ, and the size of the difference.

    The name is empty if only the outputs of the full model differ. Returns None if all outputs agree. `run_model` calls
    a model with the inputs.
    """
    names = [*find_region_names(chunked_model), ""]

    def compare(batch: T) -> Iterator[ChunkDifference]:
        whole_outputs, chunk_outputs = (
            _collect_outputs(partial(run_model, model, batch), model, names) for model in (full_model, chunked_model)
        )
        for name, outputs in whole_outputs.items():
            yield name, max(map(_compute_relative_difference, outputs, chunk_outputs[name]), default=0.0)

    return _find_first_difference((full_model, chunked_model), inputs, compare, bounds)


def _split_no_features(_: nn.Module) -> dict[str, ChunkLayout]:
    """Leave the model unchanged, because the recipe has no feature chunks."""
    return {}


def find_sequence_difference(
    full_model: nn.Module,
    task: Task,
    batch: Batch,
    num_chunks: int,
    split_features: Callable[[nn.Module], Mapping[str, ChunkLayout]] = _split_no_features,
    bounds: Bounds = _BOUNDS,
) -> ChunkDifference | None:
    """Return the first difference that sequence chunks cause in the loss or in a gradient, or None if there is none.

    `split_features` splits a copy of the model into feature chunks in place, and returns the layouts of its parameters.
    """
    chunked_model = copy.deepcopy(full_model)
    layouts = split_features(chunked_model)

    def compare(sample_batch: Batch) -> Iterator[ChunkDifference]:
        whole_loss = add_losses(task.loss(call_model(full_model, task.inputs(sample_batch)), sample_batch))
        loss, gradients = _compute_gradients(full_model, whole_loss)
        chunk_loss, chunk_gradients = _compute_gradients(
            chunked_model, torch.stack(compute_chunk_losses(chunked_model, task, sample_batch, num_chunks)).sum()
        )
        yield "the loss", _compute_relative_difference(loss, chunk_loss)
        # Compare all gradients on the same scale, because the magnitude of a gradient that is zero except for rounding
        # errors, such as that of a key bias, isn't a meaningful scale.
        scale = torch.stack([values.abs().max() for values in gradients.values()]).max()
        for name, gradient in gradients.items():
            expected = layouts[name].to_rows(gradient) if name in layouts else gradient
            yield (
                f"the gradient of {name}",
                _compute_relative_difference(expected, chunk_gradients.get(name, torch.zeros_like(expected)), scale),
            )

    return _find_first_difference((full_model, chunked_model), batch, compare, bounds)


def _find_first_difference(
    models: Sequence[nn.Module], batch: T, compare: Callable[[T], Iterable[ChunkDifference]], bounds: Bounds
) -> ChunkDifference | None:
    """Return the first difference that exceeds its bound, in the first dtype of `bounds` that the kernels support."""
    for dtype, bound in bounds.items():
        for model in models:
            model.to(dtype)
        inputs = map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)  # noqa: B023
        try:
            # `not distance <= bound` is also true if the distance is NaN.
            return next(((name, distance) for name, distance in compare(inputs) if not distance <= bound), None)
        except RuntimeError:
            if dtype is torch.float32:
                raise
    return None


def _collect_outputs(run: Callable[[], Any], model: nn.Module, names: list[str]) -> dict[str, list[Tensor]]:
    """Call `run`, and return the outputs of each named module in the order of its calls."""
    outputs: dict[str, list[Tensor]] = {}
    hooks = [model.get_submodule(name).register_forward_hook(partial(_record_outputs, outputs, name)) for name in names]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return outputs


def _record_outputs(
    outputs_by_module: dict[str, list[Tensor]], module_name: str, _module: nn.Module, _inputs: Any, outputs: Any
) -> None:
    outputs_by_module.setdefault(module_name, []).extend(get_tensors(outputs))


def _compute_gradients(model: nn.Module, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return loss.detach(), {name: gradient for name, gradient in pairs if gradient is not None}


def _compute_relative_difference(expected: Tensor, actual: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest difference relative to `scale`, or to the largest magnitude of `expected`."""
    if expected.shape != actual.shape:
        return float("inf")
    if not expected.numel() or not expected.is_floating_point():
        return 0.0
    magnitude = expected.abs().max() if scale is None else scale
    return ((expected - actual).abs().max() / magnitude.clamp_min(1e-30)).item()
