"""Finds the tensors that a variable of a script refers to, directly or through modules, containers and objects."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.training.checkpoint.tensorfile import digest_tensors

_MAX_DEPTH: Final = 4  # maximum nesting depth of containers and objects
_MAX_ITEMS: Final = 1_000  # maximum number of items to examine in a container
_MAX_TENSOR_BYTES: Final = 16 << 20  # outside of modules, a larger tensor is assumed to be a dataset
_STATELESS_TYPES: Final = (
    ModuleType,
    type,
    str,
    bytes,
    int,
    float,
    complex,
    torch.device,
    torch.dtype,
    torch.Generator,
)


def find_tensors(value: Any, excluded_ids: Collection[int]) -> list[Tensor]:
    """Return the tensors that a value refers to, skipping objects whose `id` is in `excluded_ids`."""
    return list(_iter_tensors(value, {*excluded_ids}, _MAX_DEPTH))


def compute_digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of tensors. For sparse and quantized tensors and tensor subclasses, only the shape is hashed."""
    return digest_tensors(
        tensor if _is_plain(tensor) else torch.zeros(tensor.shape, dtype=torch.bool) for tensor in tensors
    )


def list_values(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the attributes of an object.

    The result is empty for Lockstep's own objects and for types without state, such as strings and numbers.
    """
    if isinstance(value, _STATELESS_TYPES) or type(value).__module__.partition(".")[0] == "lockstep":
        return ()
    if isinstance(value, Mapping):
        return list(islice(value.values(), _MAX_ITEMS))
    if isinstance(value, list | tuple | deque | set | frozenset):
        return list(islice(value, _MAX_ITEMS))
    return list(getattr(value, "__dict__", {}).values())


def _iter_tensors(value: Any, seen_ids: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, _STATELESS_TYPES) or value is None or id(value) in seen_ids:
        return
    seen_ids.add(id(value))
    if isinstance(value, Tensor):
        if value.numel() * value.element_size() <= _MAX_TENSOR_BYTES:
            yield value
    elif isinstance(value, nn.Module):
        yield from _iter_module_tensors(value, seen_ids, depth)
    elif depth:
        for part in list_values(value):
            yield from _iter_tensors(part, seen_ids, depth - 1)


def _iter_module_tensors(module: nn.Module, seen_ids: set[int], depth: int) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module, regardless of size, and the tensors in its attributes."""
    for part in [module, *(submodule for submodule in module.modules() if id(submodule) not in seen_ids)]:
        seen_ids.add(id(part))
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and id(tensor) not in seen_ids:
                seen_ids.add(id(tensor))
                yield tensor
        for name, attribute in list(vars(part).items()):
            if depth and not name.startswith("_"):
                yield from _iter_tensors(attribute, seen_ids, depth - 1)


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return type(tensor) in (Tensor, nn.Parameter) and dense
