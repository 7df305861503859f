"""Linear operations with an explicit backward function: moving, splitting, joining, copying or adding tensors.

With autograd's own backward function of such an operation, the order in which gradients are added can depend on which
rank holds a part. Autograd can also return views, while a process that holds only one part has a separate tensor. Here
you pass the forward function and the backward function.
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

    If a result isn't used, its gradient is zeros. The functions must not keep references to tensors of the graph.
    """
    outputs: tuple[Tensor, ...] = _LinearMap.apply(forward, backward, *tensors)
    return outputs


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_map = backward
        return tuple(forward(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backward_map(gradients)
