"""Extracts the part of a model that a rank holds. Moves the tensors of other ranks to the meta device."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from lockstep.core.shard import Shard


def extract_local_module(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return a module with only the parameters and buffers `names` of `model`, in the same order.

    Submodules are shared if all of their tensors are in `names`. A submodule with only some tensors in `names` is
    replaced by an nn.Module with these tensors.
    """
    part = _extract_submodules(model, names, "")
    return nn.Module() if part is None else part


def keep_tensors(
    model: nn.Module, names: Collection[str], device: torch.device, memory_format: torch.memory_format
) -> None:
    """Move the tensors `names` to `device` like Module.to, and move all other tensors to the meta device."""
    replacements = {id(tensor): make_meta_tensor(tensor) for name, tensor in named_tensors(model) if name not in names}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in replacements:
                module._parameters[name] = replacements[id(parameter)]  # type: ignore[assignment]
            else:
                parameter.data = _move_tensor(parameter.data, device, memory_format)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = (
                    replacements[id(buffer)]
                    if id(buffer) in replacements
                    else _move_tensor(buffer, device, memory_format)
                )


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers by name. A shared tensor appears once for each of its names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def find_nonleaf_attributes(module: nn.Module) -> list[Tensor]:
    """Return the tensors in module attributes that aren't autograd leaves, such as those of the old weight_norm.

    copy.deepcopy doesn't support these tensors.
    """
    values = (value for submodule in module.modules() for value in vars(submodule).values())
    return [value for value in values if isinstance(value, Tensor) and not value.is_leaf]


def make_empty_shard(tensor: Tensor) -> Shard:
    """Return an empty shard for a tensor on other ranks. Only its shape and dtype are meaningful."""
    return Shard(torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype), 0, tensor.shape, False)


def _extract_submodules(module: nn.Module, tensor_names: Collection[str], prefix: str) -> nn.Module | None:
    is_included = [prefix + name in tensor_names for name, _ in named_tensors(module)]
    if not any(is_included):
        return None
    if all(is_included):
        return module
    part = nn.Module()
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name in tensor_names:
            part.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None and prefix + name in tensor_names:
            part.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)
    for name, child in module.named_children():
        inner = _extract_submodules(child, tensor_names, f"{prefix}{name}.")
        if inner is not None:
            part.add_module(name, inner)
    return part


def make_meta_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor or parameter on the meta device with the same shape, strides and dtype as `tensor`."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _move_tensor(tensor: Tensor, device: torch.device, memory_format: torch.memory_format) -> Tensor:
    return tensor.to(device, memory_format=memory_format) if tensor.ndim == 4 else tensor.to(device)
