"""The norms of an update by parameter: of the weights before it, of their gradient, and of how far they moved."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lockstep.parallel.engine import Update
from lockstep.training.observer import LayerNorms

Wholes = Iterable[tuple[str, Tensor]]  # by name; on rank 0 all of them, see parallel/layouts/base.py


def measure_update(
    update: Callable[[], Update], gradients: Wholes, before: Wholes, after: Wholes
) -> tuple[Update, list[LayerNorms]]:
    """Do an update, and return it with the norms of each trained parameter.

    `before` is gone through before the update, `after` then. All ranks call it; the norms are whole on rank 0.
    """
    norms = {name: _norm(gradient) for name, gradient in gradients}
    weights = {name: weight.clone() for name, weight in before}
    updated = update()
    layers = [
        LayerNorms(
            name,
            _norm(weights[name]),
            # The backward has divided by the weight of the step already.
            norms[name] / (updated.loss_scale or 1.0),
            _norm(weight.double() - weights[name].double()),
        )
        for name, weight in after
        if name in norms
    ]
    return updated, layers


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
