"""Measures the norms of each parameter, of its gradient, and of its change in an update."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lockstep.parallel.engine import Update
from lockstep.training.observer import ParameterNorms

# (name, tensor) pairs; only rank 0 gets all tensors (parallel/layouts/base.py).
FullTensors = Iterable[tuple[str, Tensor]]


def measure_update(
    apply_update: Callable[[], Update], gradients: FullTensors, weights_before: FullTensors, weights_after: FullTensors
) -> tuple[Update, list[ParameterNorms]]:
    """Call `apply_update`, and return its result and the norms of each trained parameter. All ranks call it.

    `weights_before` and `weights_after` yield the weights. They are iterated over before and after the update,
    respectively. Only rank 0 gets the norms of all parameters.
    """
    gradient_norms = {name: _l2_norm(gradient) for name, gradient in gradients}
    weights = {name: weight.clone() for name, weight in weights_before}
    updated = apply_update()
    parameter_norms = [
        ParameterNorms(
            name,
            _l2_norm(weights[name]),
            # The gradient is still multiplied by the loss scale, but already divided by the weight of the step.
            gradient_norms[name] / (updated.loss_scale or 1.0),
            _l2_norm(weight.double() - weights[name].double()),
        )
        for name, weight in weights_after
        if name in gradient_norms
    ]
    return updated, parameter_norms


def _l2_norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
