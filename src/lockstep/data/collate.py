"""Collates samples of any structure into a batch of tensors, and validates the results of custom collate functions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.common.type_name import describe_type
from lockstep.core.batch import Batch, get_tensors, leaves_with_paths, map_tensors, map_with_paths, replace_tensors
from lockstep.data.images.leaves import check_tensor, to_tensor
from lockstep.errors import UsageError


def stack_samples(label: str, samples: Sequence[Any], indices: Sequence[int]) -> Batch:
    """Stack samples of the same structure into a batch of this structure, along a new dim 0.

    Each value in the structure must be a list of numbers, or a value that data/images/leaves.py supports. Error
    messages contain `label` (the name of the dataset) and the sample index from `indices`. Raises UsageError if the
    samples differ in structure, shape or dtype.
    """
    trees = [
        _convert_leaves(f"{label} sample {number}", sample) for number, sample in zip(indices, samples, strict=True)
    ]
    leaves = [dict(leaves_with_paths(tree)) for tree in trees]
    if not leaves[0]:
        description = describe_type(samples[0])
        raise UsageError(f"{label}: expected a tensor, or a tuple, list or dict of tensors, got {description}")
    for number, sample_leaves in zip(indices, leaves, strict=True):
        if sample_leaves.keys() != leaves[0].keys():
            raise UsageError(
                f"{label}: sample {indices[0]} has {_format_leaf_names(leaves[0])}, but sample {number} has "
                f"{_format_leaf_names(sample_leaves)}; return the same structure for all samples, or set "
                f"recipe.data.collate to a function"
            )
    batch = [
        _stack_leaf(
            label, _format_leaf_name(path, trees[0]), [sample_leaves[path] for sample_leaves in leaves], indices
        )
        for path in leaves[0]
    ]
    return replace_tensors(trees[0], batch)


def check_batch(label: str, result: Any, num_samples: int) -> Batch:
    """Validate a batch that user code returned, and convert its mappings to dicts.

    Raises UsageError if a value in the batch isn't a tensor, or if the size of its dim 0 isn't `num_samples`.
    """
    batch = _to_plain_containers(result)
    if not get_tensors(batch):
        raise UsageError(
            f"{label}: expected a tensor, or a tuple, list or dict of tensors, got {describe_type(result)}"
        )
    for path, leaf in leaves_with_paths(batch):
        leaf_label = f"{label}: batch{path}"
        if not isinstance(leaf, Tensor):
            raise UsageError(f"{leaf_label} is {describe_type(leaf)}; convert it to a tensor, or remove it")
        if leaf.ndim == 0 or len(leaf) != num_samples:
            raise UsageError(
                f"{leaf_label} has shape {list(leaf.shape)} for {num_samples} samples; put samples along dim 0 of each "
                f"tensor"
            )
    return map_tensors(check_tensor, batch)


def _convert_leaves(label: str, sample: Any) -> Batch:
    """Convert all values in a sample to tensors, and keep the structure of the sample."""

    def convert_leaf(path: str, value: Any) -> Tensor:
        try:
            leaf_tensor = to_tensor(value)
        except TypeError as error:
            leaf_name = _format_leaf_name(path, sample)
            advice = "convert it, or set recipe.data.collate to a function"
            raise UsageError(f"{label}: {leaf_name}: {error}; {advice}") from error
        is_scalar_integer = (
            leaf_tensor.ndim == 0 and not leaf_tensor.is_floating_point() and leaf_tensor.dtype != torch.bool
        )
        # Integer targets of different samples may have different dtypes.
        return leaf_tensor.long() if is_scalar_integer else leaf_tensor

    return map_with_paths(convert_leaf, _to_plain_containers(sample))


def _stack_leaf(label: str, leaf_name: str, tensors: list[Tensor], sample_indices: Sequence[int]) -> Tensor:
    example_indices = {(leaf.shape, leaf.dtype): number for leaf, number in zip(tensors, sample_indices, strict=True)}
    if len(example_indices) > 1:
        description = ", ".join(
            f"{list(shape)} and {dtype} (sample {number})" for (shape, dtype), number in example_indices.items()
        )
        raise UsageError(
            f"{label}: {leaf_name}: samples differ in shape or dtype: {description}; return the same shape and dtype "
            f"for all samples, or set recipe.data.collate to a function that pads them"
        )
    return torch.stack(tensors)


def _to_plain_containers(value: Any, is_nested: bool = False) -> Any:
    """Convert a sample to plain dicts, lists and tuples.

    Nested lists of numbers are converted to NumPy arrays, so that each nested list is a single value.
    """
    if isinstance(value, Mapping):
        return {key: _to_plain_containers(item, True) for key, item in value.items()}
    if isinstance(value, list) and is_nested and _is_numeric_array(value):
        return np.array(value)
    if type(value) in (list, tuple):
        return type(value)(_to_plain_containers(item, True) for item in value)
    return value


def _is_numeric_array(values: list[Any]) -> bool:
    """Return whether a list contains only numbers, or only lists of numbers with the same length."""
    if all(isinstance(item, list) for item in values):
        return len({len(item) for item in values}) == 1 and all(map(_is_numeric_array, values))
    return all(isinstance(item, int | float) for item in values)


def _format_leaf_name(path: str, sample: Any) -> str:
    """Return the display name of a value: `input` or `target` if the sample is a pair, and the path otherwise."""
    is_pair = isinstance(sample, tuple | list) and len(sample) == 2
    return {"[0]": "input", "[1]": "target"}.get(path, path) if is_pair else path or "value"


def _format_leaf_names(leaves: Mapping[str, Any]) -> str:
    return ", ".join(path or "a single value" for path in leaves) or "no values"
