"""Whether a model computes in chunks of its sequences what it computes whole: layers may mix positions unseen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.core.batch import Batch, call, mapped
from lockstep.core.shard import Chunked
from lockstep.errors import VerificationError
from lockstep.run.build import Setup
from lockstep.run.chunking import cut
from lockstep.run.examples import examples, repeated
from lockstep.run.sequences import losses_in
from lockstep.tasks.base import Task

# Of the largest magnitude. Chunks add in another order, which is far less; a convolution between them does far more.
_BOUNDS: Final = {torch.float64: 2.0**-30, torch.float32: 2.0**-10}
_SAMPLES: Final = 2


class _Computed(NamedTuple):
    loss: Tensor
    gradients: list[tuple[str, Tensor]]


def check_sequence_chunks(ready: Setup) -> None:
    """Raise VerificationError where the model of a recipe has another loss, or another gradient, in its chunks."""
    asked, name = ready.recipe.model, ready.problem.name
    if asked.sequence_chunks == 1:
        return
    features = partial(cut, chunks=asked.chunks, plan=asked.plan, name=asked.name) if asked.chunks > 1 else _whole
    example, _ = examples(ready.recipe, ready.data)
    batch = repeated(example, _SAMPLES)
    found = departure(ready.uncut().eval(), ready.task, batch, asked.sequence_chunks, features)
    if found is not None:
        what, apart = found
        raise VerificationError(
            f"recipe.model.sequence_chunks: in {asked.sequence_chunks} chunks {name} computes something else than "
            f"whole: {what} differs by {apart:.2g} of the largest value; outside of attention it has to treat each "
            f"position by itself, as position_ids say where it is: without convolutions, pooling or shifts along a "
            f"sequence"
        )


def _whole(_: nn.Module) -> dict[str, Chunked]:
    """Leave a model's features whole."""
    return {}


def departure(
    whole: nn.Module,
    task: Task,
    batch: Batch,
    chunks: int,
    cut_features: Callable[[nn.Module], Mapping[str, Chunked]] = _whole,
) -> tuple[str, float] | None:
    """Return what is another in chunks of sequences, the loss or a gradient, and by what part; None where nothing is.

    `cut_features` cuts a copy of the model into chunks of its features, in place, and returns how parameters are
    rearranged by it.
    """
    in_chunks = copy.deepcopy(whole)
    chunked = cut_features(in_chunks)
    for dtype, bound in _BOUNDS.items():
        whole.to(dtype)
        in_chunks.to(dtype)
        given = mapped(lambda each: each.to(dtype) if each.is_floating_point() else each, batch)  # noqa: B023
        try:
            expected = _computed(whole, lambda: task.loss(call(whole, task.inputs(given)), given))  # noqa: B023
        except RuntimeError:
            if dtype is torch.float32:
                raise
            continue  # some kernels take no float64
        found = _computed(in_chunks, lambda: torch.stack(losses_in(in_chunks, task, given, chunks)).sum())  # noqa: B023
        rearranged = [
            (name, chunked[name].rearranged(each) if name in chunked else each) for name, each in expected.gradients
        ]
        return _departure(expected._replace(gradients=rearranged), found, bound)
    return None


def _computed(model: nn.Module, loss_of: Callable[[], Tensor]) -> _Computed:
    model.zero_grad()
    loss = loss_of()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]
    return _Computed(loss.detach(), [(name, gradient.clone()) for name, gradient in gradients])


def _departure(whole: _Computed, parts: _Computed, bound: float) -> tuple[str, float] | None:
    apart = _apart(whole.loss, parts.loss, whole.loss.abs())
    if not apart <= bound:  # or it is not a number
        return "the loss", apart
    # One scale for all: a gradient that is zero but for rounding, as that of a key's bias, says nothing by itself.
    largest = torch.stack([gradient.abs().max() for _, gradient in whole.gradients]).max()
    found = dict(parts.gradients)
    for name, gradient in whole.gradients:
        other = _apart(gradient, found.get(name, torch.zeros_like(gradient)), largest)
        if not other <= bound:
            return f"the gradient of {name}", other
    return None


def _apart(one: Tensor, other: Tensor, largest: Tensor) -> float:
    return ((one - other).abs().max() / largest.clamp_min(1e-30)).item()
