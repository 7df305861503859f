"""A step of a forward that moves, cuts, joins, copies or adds tensors, given by itself and by what its backward does.

Where autograd knows such a step by itself it may add gradients in an order that depends on who has which part, or give
views where a process that has a part alone has a tensor of its own. Here both directions are said.
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
    """Return `forward(tensors)`; in backward, `backward` gives their gradients for those of the results.

    A result that nothing uses has a gradient of zeros. Neither function may keep a tensor of the graph.
    """
    made: tuple[Tensor, ...] = _LinearMap.apply(forward, backward, *tensors)
    return made


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.of_results = backward
        return tuple(forward(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.of_results(gradients)
