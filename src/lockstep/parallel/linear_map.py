"""Linear operations with an explicit backward function: moving, splitting, joining, copying or adding tensors.

If autograd derives the backward function, the order in which it adds gradients can depend on which rank holds a part.
It can also return views, while a process that only holds one part has a separate tensor. Therefore `linear_map` takes
both functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_map(
    forward: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    backward: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return `forward(tensors)`. `backward` maps the gradients of the results to the gradients of `tensors`.

    If a result isn't used, its gradient is zero. The functions must not keep references to tensors of the graph.
    """
    outputs: tuple[Tensor, ...] = _LinearMap.apply(forward, backward, *tensors)
    return outputs


class _LinearMap(torch.autograd.Function):
    """Calls the given functions as forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_map = backward
        return tuple(forward(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backward_map(gradients)
