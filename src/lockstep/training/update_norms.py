"""The norms of each parameter before an update, of its gradient, and of its change by the update."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lockstep.parallel.engine import Update
from lockstep.training.observer import LayerNorms

# (name, tensor) pairs; only rank 0 gets all tensors (parallel/layouts/base.py).
FullTensors = Iterable[tuple[str, Tensor]]


def measure_update(
    update: Callable[[], Update], gradients: FullTensors, before: FullTensors, after: FullTensors
) -> tuple[Update, list[LayerNorms]]:
    """Run `update`. Return its result, and the norms of each trained parameter.

    `before` is iterated over before the update, and `after` is iterated over after it. All ranks call it. Only rank 0
    gets the norms of all parameters.
    """
    norms = {name: _norm(gradient) for name, gradient in gradients}
    weights = {name: weight.clone() for name, weight in before}
    updated = update()
    layers = [
        LayerNorms(
            name,
            _norm(weights[name]),
            # The backward pass has already divided the gradient by the weight of the step.
            norms[name] / (updated.loss_scale or 1.0),
            _norm(weight.double() - weights[name].double()),
        )
        for name, weight in after
        if name in norms
    ]
    return updated, layers


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
