"""The outputs of a sharded model's units, whose memory fully_shard may free, and whose hooks it uses to gather."""

from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def own_outputs(outputs: Any, inputs: Any, freed: set[int]) -> Any:
    """Return outputs that don't share memory with freed tensors, and aren't views for autograd.

    `freed` are the addresses of the memory that is freed after the unit's forward. If a unit returns parameters or
    views of them, they would be read after they are freed. fully_shard also gathers the parameters of a unit for its
    backward in a hook of its outputs. If an output is a view and is changed in place, the hook is lost.
    """
    views = torch.is_grad_enabled()
    if not (views or freed):
        return outputs
    input_ids = {id(leaf) for leaf in tree_leaves(inputs)} if views else set()

    def separate(output: Tensor) -> Tensor:
        if id(output) in input_ids:  # the output is an input, and must stay the same tensor
            return output
        has_memory = type(output) in (Tensor, nn.Parameter) and output.layout == torch.strided
        if has_memory and output.untyped_storage().data_ptr() in freed:
            return output.clone()
        return cast(Tensor, _Unchanged.apply(output, output.stride())) if views and output._is_view() else output

    return tree_map_only(Tensor, separate, outputs)


@final
class _Unchanged(torch.autograd.Function):
    """Returns a tensor with the given strides and its gradient as is. A torch view would change the strides of both."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        alias = tensor.detach()
        return alias if alias.stride() == stride else alias.as_strided(alias.shape, stride)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
