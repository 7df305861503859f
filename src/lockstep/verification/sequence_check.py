"""Whether a model computes in chunks of its sequences what it computes whole: layers may mix positions unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.core.batch import Batch, call, mapped
from lockstep.errors import VerificationError
from lockstep.run.build import Setup
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
    chunks, name = ready.recipe.model.sequence_chunks, ready.problem.name
    if chunks == 1:
        return
    example, _ = examples(ready.recipe, ready.data)
    found = departure(ready.uncut().eval(), ready.task, repeated(example, _SAMPLES), chunks)
    if found is not None:
        what, apart = found
        raise VerificationError(
            f"recipe.model.sequence_chunks: in {chunks} chunks {name} computes something else than whole: {what} "
            f"differs by {apart:.2g} of the largest value; outside of attention it has to treat each position by "
            f"itself, as position_ids say where it is: without convolutions, pooling or shifts along a sequence"
        )


def departure(model: nn.Module, task: Task, batch: Batch, chunks: int) -> tuple[str, float] | None:
    """Return what is another in chunks, the loss or a gradient, and by what part; None where nothing is."""
    for dtype, bound in _BOUNDS.items():
        model.to(dtype)
        given = mapped(lambda each: each.to(dtype) if each.is_floating_point() else each, batch)  # noqa: B023
        try:
            whole = _computed(model, lambda: task.loss(call(model, task.inputs(given)), given))  # noqa: B023
        except RuntimeError:
            if dtype is torch.float32:
                raise
            continue  # some kernels take no float64
        parts = _computed(model, lambda: torch.stack(losses_in(model, task, given, chunks)).sum())  # noqa: B023
        return _departure(whole, parts, bound)
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
