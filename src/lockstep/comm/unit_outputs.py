"""The outputs of a sharded model's units, which fully_shard frees the memory of, or gathers at the gradients of."""

from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def own_outputs(outputs: Any, inputs: Any, freed: set[int]) -> Any:
    """Return outputs that share no memory with what is freed after a unit's forward, or, to autograd, with others.

    `freed` are the addresses of the memory that is freed. Parameters that a unit returns, or views of them, would be
    read when they are no longer there. And fully_shard gathers a unit's parameters for its backward in a hook of its
    outputs, which one that is changed in place loses if it is a view.
    """
    views = torch.is_grad_enabled()
    if not (views or freed):
        return outputs
    given = {id(leaf) for leaf in tree_leaves(inputs)} if views else set()

    def alone(output: Tensor) -> Tensor:
        if id(output) in given:  # its other readers are others of the input, too
            return output
        has_memory = type(output) in (Tensor, nn.Parameter) and output.layout == torch.strided
        if has_memory and output.untyped_storage().data_ptr() in freed:
            return output.clone()
        return cast(Tensor, _Unchanged.apply(output, output.stride())) if views and output._is_view() else output

    return tree_map_only(Tensor, alone, outputs)


@final
class _Unchanged(torch.autograd.Function):
    """A tensor with these strides, and its gradient as it is: a view of torch's would make strides of both anew."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        same = tensor.detach()
        return same if same.stride() == stride else same.as_strided(same.shape, stride)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
