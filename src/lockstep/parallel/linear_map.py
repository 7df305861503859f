"""Linear operations with an explicit backward function: moving, splitting, joining, copying or adding tensors.

If autograd derived the backward function, the order in which it adds gradients could depend on which rank holds a
tensor. Autograd could also return views of a larger gradient, whereas a rank that holds only one of the tensors has a
separate gradient. Therefore `apply_linear_map` takes both the forward and the backward function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def apply_linear_map(
    forward: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    backward: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return `forward(tensors)`, which autograd differentiates with `backward`.

    `backward` maps the gradients of the outputs to the gradients of `tensors`. The gradient of an unused output is
    zeros. Neither function may keep references to tensors in the autograd graph.
    """
    outputs: tuple[Tensor, ...] = _LinearMap.apply(forward, backward, *tensors)
    return outputs


class _LinearMap(torch.autograd.Function):
    """An autograd function whose forward and backward passes call the functions passed to `apply`."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_map = backward
        return tuple(forward(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backward_map(gradients)
