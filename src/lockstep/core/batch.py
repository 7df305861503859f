"""Batches: tensors, or nested tuples, lists, mappings and dataclasses of tensors. Dim 0 is the sample dimension.

A dataclass, a SimpleNamespace or a UserDict (such as the encodings of transformers) is treated as a container of its
attributes. Functions that replace tensors return a shallow copy and don't modify the original object.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

# Use torch's private pytree module, because transformers registers its output types there, and not with optree.
from torch.utils import _pytree as pytree

Batch = Any
Inputs = tuple[Any, ...] | Mapping[str, Any]  # positional or keyword arguments of a model's forward method


def get_tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch in traversal order. Other values are skipped."""
    if isinstance(batch, Tensor):
        return [batch]
    if type(batch) in (list, tuple) and all(isinstance(tensor, Tensor) for tensor in batch):
        return [*batch]  # fast path for common batches: pytree.tree_leaves takes 5 us
    tensors: list[Tensor] = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif attributes := _get_attributes(leaf):
            tensors += get_tensors(attributes)
    return tensors


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """Return a batch with `function` applied to each tensor. Other values stay the same."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        attributes = _get_attributes(leaf)
        return _replace_attributes(leaf, map_tensors(function, attributes)) if attributes else leaf

    return pytree.tree_map(convert, batch)


def replace_tensors(batch: Batch, leaves: Iterable[Any]) -> Batch:
    """Return a batch with the structure of `batch`, with its tensors replaced by `leaves` in traversal order."""
    remaining = iter(leaves)
    return map_tensors(lambda _: next(remaining), batch)


def leaves_with_paths(batch: Batch) -> list[tuple[str, Any]]:
    """Return the path and the value of each pytree leaf. Paths look like `['input']` or `[0]`; the root is ""."""
    leaves: list[tuple[str, Any]] = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        attributes = {} if isinstance(leaf, Tensor) else _get_attributes(leaf)
        leaves += [(pytree.keystr(path) + inner, value) for inner, value in leaves_with_paths(attributes)] or [
            (pytree.keystr(path), leaf)
        ]
    return leaves


def map_with_paths(function: Callable[[str, Any], Any], batch: Batch) -> Batch:
    """Return a batch with `function(path, leaf)` applied to each pytree leaf. Paths are as in `leaves_with_paths`."""

    def convert_leaf(path: Any, leaf: Any) -> Any:
        attributes = {} if isinstance(leaf, Tensor) else _get_attributes(leaf)
        if not attributes:
            return function(pytree.keystr(path), leaf)
        inner = map_with_paths(lambda subpath, value: function(pytree.keystr(path) + subpath, value), attributes)
        return _replace_attributes(leaf, inner)

    return pytree.tree_map_with_path(convert_leaf, batch)


def get_batch_size(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(get_tensors(batch)[0])


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model with positional or keyword inputs and return its output."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _get_attributes(leaf: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass, SimpleNamespace or UserDict, or {} for an object of any other type."""
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    return dict(vars(leaf)) if isinstance(leaf, SimpleNamespace | UserDict) else {}


def _replace_attributes(leaf: Any, attributes: Mapping[str, Any]) -> Any:
    result = copy(leaf)
    for name, value in attributes.items():
        object.__setattr__(result, name, value)  # setattr would raise for a frozen dataclass
    return result
