"""Infers the dataset properties that tasks need: the class names and the type of the targets.

The properties are stored in `DataSet.facts` for tasks and models, and are saved in checkpoints.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lockstep.common.type_name import describe_type
from lockstep.core.batch import Batch
from lockstep.errors import UsageError
from lockstep.tasks.classification import check_targets, compute_skip_mask

NAMES: Final = "classes"  # key of the class names, in the dataset properties and in the options of custom datasets
OUTPUT_PROPERTIES: Final = (NAMES,)  # dataset properties that determine the last layer of a model
# The maximum number of classes. Since each class has a name, a wrong number could exhaust the memory.
_MAX_CLASSES: Final = 1 << 24
# Learning is slow if the mean or standard deviation of a target is above this limit, or if its standard deviation is
# below its reciprocal.
_SCALE_LIMIT: Final = 1_000


def make_dataset_info(
    classes: Sequence[str],
    shape: Sequence[int],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the properties of a dataset with these class names, and with samples of `shape` at the model's input.

    For images, also pass the mean and standard deviation of each channel, for values in [0, 1].
    """
    return {NAMES: list(classes), "shape": list(shape), "mean": mean and list(mean), "std": std and list(std)}


def find_class_names(label: str, option: Any, train: Any) -> list[str]:
    """Return the class names of a custom training set, or an empty list if there are no classes.

    Uses the first of these sources that exists:
    - `option`, which is a number or a list of names
    - the attribute `classes` of `train`, which is a number or a list of names
    - the attribute `targets` of `train`, which contains class indices up to the number of classes minus one

    Raises UsageError if `option` is neither a number nor a list.
    """
    classes = getattr(train, NAMES, None) if option is None else option
    if isinstance(classes, int | np.integer) and not isinstance(classes, bool) and 0 < classes <= _MAX_CLASSES:
        return [str(number) for number in range(int(classes))]
    if isinstance(classes, list | tuple) and classes:
        return [str(name) for name in classes]
    if option is not None:
        raise UsageError(
            f"{label}: recipe.data.options.{NAMES}: expected the number of classes or a list of their names, got "
            f"{describe_type(option)}"
        )
    targets = getattr(train, "targets", None)
    return [] if targets is None else [str(number) for number in range(_count_classes(targets))]


def infer_target_info(batch: Batch, class_names: Sequence[str]) -> dict[str, Any]:
    """Infer the target properties of a dataset from a batch and the class names.

    Returns a dict with these keys:
    - `classes`: The class names, if there are any.
    - `pixels`: True if each pixel has its own class.
    - `outputs`: The number of values per target, if targets are floats and there are no classes.
    """
    entries: dict[str, Any] = {NAMES: list(class_names)} if class_names else {}
    if is_pair(batch):
        targets = batch[1]
        if class_names and targets.ndim > 2 and not targets.is_floating_point():
            entries["pixels"] = True
        if not class_names and targets.is_floating_point():
            entries["outputs"] = targets[0].numel()
    return entries


def check_pair(label: str, batch: Batch, sample_indices: Sequence[int], class_names: Sequence[str]) -> None:
    """Raise UsageError if the targets in a batch (inputs, targets) aren't valid classes.

    The message contains `label` (the name of the dataset) and the index of the sample from `sample_indices`. Targets
    with a class per pixel are checked by the task instead.
    """
    targets = batch[1] if class_names and isinstance(batch, tuple) and len(batch) == 2 else None
    if isinstance(targets, Tensor) and (targets.ndim < 3 or targets.is_floating_point()):
        check_targets(label, targets, sample_indices, len(class_names))


def find_skip_mask(batch: Batch, class_names: Sequence[str]) -> Callable[[Batch], Tensor] | None:
    """Return a function that computes the mask of skipped samples, or None if targets can't mark skipped samples."""
    return compute_skip_mask if class_names and is_pair(batch) else None


def count_sample_classes(dataset_info: Mapping[str, Any]) -> int | None:
    """Return the number of classes if each sample has a single class, and None otherwise."""
    return None if NAMES not in dataset_info or dataset_info.get("pixels") else len(dataset_info[NAMES])


def find_scale_warnings(dataset_info: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each target whose scale is too far from 1 for common learning rates.

    The warnings don't apply to models that scale their outputs, such as `mlp`.
    """
    for name, (mean, std) in zip(dataset_info.get("targets", ()), dataset_info.get("target_scale", ()), strict=False):
        if max(abs(mean), std) > _SCALE_LIMIT or std < 1 / _SCALE_LIMIT:
            yield (
                f"target '{name}' has mean {mean:.4g} and standard deviation {std:.4g}, so a model that does not scale "
                f"its outputs learns it slowly or not at all; use recipe.model.name=mlp, which scales its outputs, or "
                f"standardize the target"
            )


def is_pair(batch: Batch) -> bool:
    """Return whether a batch is a tuple (inputs, targets) of two tensors."""
    return isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(item, Tensor) for item in batch)


def _count_classes(targets: Any) -> int:
    """Return the number of classes in the targets of a training set, or 0 if targets aren't class indices."""
    try:
        numbers = torch.as_tensor(targets)
        count = 0 if numbers.is_floating_point() or not numbers.numel() else int(numbers.max()) + 1
    except (TypeError, ValueError, RuntimeError):  # the targets aren't numbers
        return 0
    return count if 0 < count <= _MAX_CLASSES else 0
