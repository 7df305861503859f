"""A batch: a tensor, or tuples, lists and mappings of them, however nested; samples run along dim 0 of each tensor."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

# torch has no public door to its pytrees; optree does not know what transformers registers here.
from torch.utils import _pytree as pytree

Batch = Any
Inputs = tuple[Any, ...] | Mapping[str, Any]  # of a model's forward: by position, or by name


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch, in its order; what is no tensor is left out."""
    if isinstance(batch, Tensor):
        return [batch]
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """Return the batch with `change` applied to each of its tensors; what is no tensor stays."""
    return pytree.tree_map_only(Tensor, change, batch)


def like(batch: Batch, leaves: Iterable[Any]) -> Batch:
    """Return `leaves`, such as tensors, in the shape of `batch`, in place of its own tensors."""
    remaining = iter(leaves)
    return map_tensors(lambda _: next(remaining), batch)


def with_paths(batch: Batch) -> list[tuple[str, Any]]:
    """Return each leaf of a batch, tensor or not, and where it stands: `['input']`, `[0]`, "" for the batch itself."""
    leaves, _ = pytree.tree_flatten_with_path(batch)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def map_with_paths(change: Callable[[str, Any], Any], batch: Batch) -> Batch:
    """Return the batch with `change`, which receives the path, applied to each of its leaves; see `with_paths`."""
    return pytree.tree_map_with_path(lambda path, leaf: change(pytree.keystr(path), leaf), batch)


def length(batch: Batch) -> int:
    """Return the number of samples of a batch."""
    return len(tensors_of(batch)[0])


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return what the model gives for its inputs."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
