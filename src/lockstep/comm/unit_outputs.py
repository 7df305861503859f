"""Keeps the outputs of units valid after fully_shard has freed the units' gathered parameters."""

from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def separate_outputs(outputs: Any, inputs: Any, freed_addresses: set[int]) -> Any:
    """Return outputs that share no memory with freed tensors and aren't autograd views.

    `freed_addresses` contains the addresses of memory that is freed after the forward pass of the unit. Outputs in this
    memory, such as parameters or views of parameters, are copied. Views are also replaced, because an in-place
    operation on a view would remove the hook with which fully_shard gathers the unit for its backward pass.
    """
    grad_enabled = torch.is_grad_enabled()
    if not (grad_enabled or freed_addresses):
        return outputs
    input_ids = {id(leaf) for leaf in tree_leaves(inputs)} if grad_enabled else set()

    def separate(output: Tensor) -> Tensor:
        if id(output) in input_ids:  # an input that the unit returns must stay the same tensor
            return output
        has_memory = type(output) in (Tensor, nn.Parameter) and output.layout == torch.strided
        if has_memory and output.untyped_storage().data_ptr() in freed_addresses:
            return output.clone()
        return cast(Tensor, _Identity.apply(output, output.stride())) if grad_enabled and output._is_view() else output

    return tree_map_only(Tensor, separate, outputs)


@final
class _Identity(torch.autograd.Function):
    """The identity for a tensor and its gradient. Unlike a torch view, keeps the strides of both."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        alias = tensor.detach()
        return alias if alias.stride() == stride else alias.as_strided(alias.shape, stride)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
