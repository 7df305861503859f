"""What data states of what is to be learned from it: the names of its classes, and of what kind its targets are.

They are among a dataset's `facts`, which tasks and models read, and which a checkpoint keeps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lockstep.common.type_name import type_name
from lockstep.core.batch import Batch
from lockstep.errors import UsageError
from lockstep.tasks.classification import check_targets, skip_mask

NAMES: Final = "classes"  # the fact, and the option of data of the user's own that gives it
DECIDE_OUTPUTS: Final = (NAMES,)  # facts that the last layer of a model was trained for
_MOST: Final = 1 << 24  # each has a name: a number in the wrong place would take all memory


def facts(
    classes: Sequence[str],
    shape: Sequence[int],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the names of the classes by their numbers and the shape of a sample as the model sees it.

    For images also mean and std of each channel, of values in [0, 1].
    """
    return {NAMES: list(classes), "shape": list(shape), "mean": mean and list(mean), "std": std and list(std)}


def find_class_names(label: str, given: Any, train: Any) -> list[str]:
    """Return the names of the classes of a user's training set; an empty list where there are none.

    They are `given`, a number or a list, else its attribute `classes`, else counted from its `targets`.
    """
    named = getattr(train, NAMES, None) if given is None else given
    if isinstance(named, int | np.integer) and not isinstance(named, bool) and 0 < named <= _MOST:
        return [str(number) for number in range(int(named))]
    if isinstance(named, list | tuple) and named:
        return [str(each) for each in named]
    if given is not None:
        raise UsageError(f"{label}: options.{NAMES}: expected a number or a list of names, got {type_name(given)}")
    targets = getattr(train, "targets", None)
    return [] if targets is None else [str(number) for number in range(_count_classes(targets))]


def of_targets(batch: Batch, names: Sequence[str]) -> dict[str, Any]:
    """Return what a batch, and the names of the classes, say of the targets."""
    known: dict[str, Any] = {NAMES: list(names)} if names else {}
    if is_pair(batch):
        targets = batch[1]
        if names and targets.ndim > 2 and not targets.is_floating_point():
            known["pixels"] = True
        if not names and targets.is_floating_point():
            known["outputs"] = targets[0].numel()
    return known


def check_pair(label: str, batch: Batch, numbers: Sequence[int], names: Sequence[str]) -> None:
    """Raise UsageError where a pair's targets are none of the classes; those of pixels the task looks at.

    `numbers` are those of the samples in the dataset `label`.
    """
    targets = batch[1] if names and isinstance(batch, tuple) and len(batch) == 2 else None
    if isinstance(targets, Tensor) and (targets.ndim < 3 or targets.is_floating_point()):
        check_targets(label, targets, numbers, len(names))


def skipping(batch: Batch, names: Sequence[str]) -> Callable[[Batch], Tensor] | None:
    """Return what says which samples of such batches count as nothing, None where that cannot be."""
    return skip_mask if names and is_pair(batch) else None


def whole_samples(known: Mapping[str, Any]) -> int | None:
    """Return how many classes samples have by these facts; None where a sample as a whole has none."""
    return None if NAMES not in known or known.get("pixels") else len(known[NAMES])


def is_pair(batch: Batch) -> bool:
    """Return whether a batch is (inputs, targets), a tensor each."""
    return isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(each, Tensor) for each in batch)


def _count_classes(targets: Any) -> int:
    """Return how many classes the targets of a training set number, 0 where they are no such numbers."""
    try:
        numbers = torch.as_tensor(targets)
        counted = 0 if numbers.is_floating_point() or not numbers.numel() else int(numbers.max()) + 1
    except (TypeError, ValueError, RuntimeError):  # no numbers
        return 0
    return counted if 0 < counted <= _MOST else 0
