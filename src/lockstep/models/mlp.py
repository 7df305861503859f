"""A multilayer perceptron for the rows of a table, or for any samples of a fixed shape.

Regression targets, such as prices or lengths in meters, can have any scale. Therefore, the linear layers predict
standardized targets, which the model converts to the original units with the mean and standard deviation of the
training split.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError


def mlp(
    shape: Sequence[int],
    num_classes: int | None = None,
    outputs: int | None = None,
    target_scale: Sequence[Sequence[float]] | None = None,
    width: int = 64,
    depth: int = 2,
) -> nn.Module:
    """Return an MLP with `depth` hidden ReLU layers, which maps [n, *shape] to [n, num_classes] or [n, outputs].

    `target_scale` contains the mean and standard deviation of each output. If it is None, outputs aren't rescaled.
    Raises UsageError if neither `num_classes` nor `outputs` is set.
    """
    sizes = [math.prod(shape), *[width] * depth]
    if (out_features := num_classes or outputs) is None:
        raise UsageError(
            "model mlp: the data has neither classes nor numeric targets; set num_classes or outputs in "
            "recipe.model.options"
        )
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    for size, next_size in pairwise(sizes):
        layers += [nn.Linear(size, next_size), nn.ReLU()]
    layers.append(nn.Linear(sizes[-1], out_features))
    if target_scale is not None and num_classes is None:
        layers.append(_TargetScale(target_scale))
    return nn.Sequential(*layers)


@final
class _TargetScale(nn.Module):
    """Converts standardized outputs to the units of the targets. The mean and std are buffers in the state_dict."""

    mean: Tensor
    std: Tensor

    def __init__(self, target_scale: Sequence[Sequence[float]]) -> None:
        super().__init__()
        means, deviations = zip(*target_scale, strict=True)
        self.register_buffer("mean", torch.tensor(means, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(deviations, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x * self.std + self.mean
        return output
