"""Copies or aliases the outputs of units whose memory fully_shard may free, or whose hooks it uses to gather."""

from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def separate_outputs(outputs: Any, inputs: Any, freed: set[int]) -> Any:
    """Return outputs that share no memory with freed tensors and aren't autograd views.

    `freed` contains the addresses of memory that is freed after the forward pass of the unit. If a unit returns
    parameters or views of parameters, they would otherwise be read after they are freed. In addition, fully_shard
    gathers the parameters of a unit for its backward pass in a hook on its outputs. If an output is a view, an in-place
    operation on the output would remove the hook.
    """
    views = torch.is_grad_enabled()
    if not (views or freed):
        return outputs
    input_ids = {id(leaf) for leaf in tree_leaves(inputs)} if views else set()

    def separate(output: Tensor) -> Tensor:
        if id(output) in input_ids:  # the unit returns an input, which must remain the same tensor
            return output
        has_memory = type(output) in (Tensor, nn.Parameter) and output.layout == torch.strided
        if has_memory and output.untyped_storage().data_ptr() in freed:
            return output.clone()
        return cast(Tensor, _Identity.apply(output, output.stride())) if views and output._is_view() else output

    return tree_map_only(Tensor, separate, outputs)


@final
class _Identity(torch.autograd.Function):
    """Identity for a tensor and its gradient. Keeps the strides of both, which a torch view would change."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        alias = tensor.detach()
        return alias if alias.stride() == stride else alias.as_strided(alias.shape, stride)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
