"""Whether a model computes in chunks what it computes whole: a plan may be possible and wrong, and layers may mix
positions unseen."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from lockstep.core.batch import Batch, Inputs, call, map_tensors, tensors_of
from lockstep.core.shard import Chunked
from lockstep.errors import VerificationError
from lockstep.parallel.tensor.plan import region_names
from lockstep.run.build import Setup
from lockstep.run.chunking import cut, losses_in
from lockstep.run.examples import examples, repeat_samples
from lockstep.tasks.base import Task

# Of the largest magnitude. Chunks add in another order, which is far less; what computes something else is far more.
_BOUNDS: Final = {torch.float64: 2.0**-30, torch.float32: 2.0**-10}
_SAMPLES: Final = 2

T = TypeVar("T")
Departure = tuple[str, float]  # what is another, and by which part of the largest magnitude


def check_chunks(ready: Setup) -> None:
    """Raise VerificationError where the model of a recipe has other outputs in chunks of its features."""
    config = ready.recipe.model
    if config.chunks == 1:
        return
    whole = ready.uncut()
    whole.eval()  # calls train(), which of the user's own may return nothing
    in_chunks = copy.deepcopy(whole)
    cut(in_chunks, config.chunks, config.plan, config.name)
    _, batch = examples(ready.recipe, ready.data)
    if found := feature_departure(whole, in_chunks, ready.task.inputs(batch)):
        raise VerificationError(
            f"recipe.model.plan: in {config.chunks} chunks {found[0] or 'the model'} computes something else than "
            f"whole: its outputs differ by {found[1]:.2g} of the largest; between a colwise and a rowwise layer each "
            f"feature, or head, must be treated by itself, and heads must be counted by heads:NAMES"
        )


def check_sequence_chunks(ready: Setup) -> None:
    """Raise VerificationError where the model of a recipe has another loss or gradient in chunks of its sequences."""
    config, name = ready.recipe.model, ready.problem.name
    if config.sequence_chunks == 1:
        return
    features = partial(cut, chunks=config.chunks, plan=config.plan, name=config.name) if config.chunks > 1 else _whole
    example, _ = examples(ready.recipe, ready.data)
    batch = repeat_samples(example, _SAMPLES)
    if found := sequence_departure(ready.uncut().eval(), ready.task, batch, config.sequence_chunks, features):
        raise VerificationError(
            f"recipe.model.sequence_chunks: in {config.sequence_chunks} chunks {name} computes something else than "
            f"whole: {found[0]} differs by {found[1]:.2g} of the largest value; outside of attention it must treat "
            f"each position by itself, where position_ids place it: no convolution, pooling or shift along a sequence"
        )


def feature_departure(whole: nn.Module, in_chunks: nn.Module, inputs: Inputs) -> Departure | None:
    """Return the first region, or "" for the model, that has other outputs; None where none has."""
    names = [*region_names(in_chunks), ""]

    def compare(given: Inputs) -> Iterator[Departure]:
        expected, found = (_outputs(model, names, given) for model in (whole, in_chunks))
        for name, outputs in expected.items():
            yield name, max(map(_distance, outputs, found[name]), default=0.0)

    return _first_beyond_bound((whole, in_chunks), inputs, compare)


def _whole(_: nn.Module) -> dict[str, Chunked]:
    """Leave a model's features whole."""
    return {}


def sequence_departure(
    whole: nn.Module,
    task: Task,
    batch: Batch,
    chunks: int,
    cut_features: Callable[[nn.Module], Mapping[str, Chunked]] = _whole,
) -> Departure | None:
    """Return what is another in chunks of sequences, the loss or a gradient; None where nothing is.

    `cut_features` cuts a copy of the model into chunks of its features, in place, and returns how parameters are
    rearranged by it.
    """
    in_chunks = copy.deepcopy(whole)
    chunked = cut_features(in_chunks)

    def compare(given: Batch) -> Iterator[Departure]:
        loss, gradients = _loss_and_gradients(whole, task.loss(call(whole, task.inputs(given)), given))
        added, found = _loss_and_gradients(in_chunks, torch.stack(losses_in(in_chunks, task, given, chunks)).sum())
        yield "the loss", _distance(loss, added)
        # One scale for all: a gradient that is zero but for rounding, as that of a key's bias, says nothing by itself.
        scale = torch.stack([each.abs().max() for each in gradients.values()]).max()
        for name, gradient in gradients.items():
            expected = chunked[name].to_rows(gradient) if name in chunked else gradient
            yield f"the gradient of {name}", _distance(expected, found.get(name, torch.zeros_like(expected)), scale)

    return _first_beyond_bound((whole, in_chunks), batch, compare)


def _first_beyond_bound(
    models: Sequence[nn.Module], given: T, compare: Callable[[T], Iterable[Departure]]
) -> Departure | None:
    """Return the first distance that rounding does not explain, in float64, or in float32 where kernels need that."""
    for dtype, bound in _BOUNDS.items():
        for model in models:
            model.to(dtype)
        inputs = map_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, given)  # noqa: B023
        try:
            # A distance that is not a number is beyond any bound.
            return next(((what, distance) for what, distance in compare(inputs) if not distance <= bound), None)
        except RuntimeError:
            if dtype is torch.float32:
                raise
    return None


def _outputs(model: nn.Module, names: list[str], inputs: Inputs) -> dict[str, list[Tensor]]:
    """Return the tensors that each of these modules gave, in the order of their calls."""
    seen: dict[str, list[Tensor]] = {}
    hooks = [model.get_submodule(name).register_forward_hook(partial(_keep, seen, name)) for name in names]
    with torch.no_grad():
        call(model, inputs)
    for hook in hooks:
        hook.remove()
    return seen


def _keep(seen: dict[str, list[Tensor]], name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
    seen.setdefault(name, []).extend(tensors_of(outputs))


def _loss_and_gradients(model: nn.Module, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    found = zip(parameters, gradients, strict=True)
    return loss.detach(), {name: gradient for name, gradient in found if gradient is not None}


def _distance(one: Tensor, other: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest distance as a part of `scale`, else of the largest magnitude of `one`."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel() or not one.is_floating_point():
        return 0.0
    largest = one.abs().max() if scale is None else scale
    return ((one - other).abs().max() / largest.clamp_min(1e-30)).item()
