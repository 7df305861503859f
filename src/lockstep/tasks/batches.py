"""Finds the targets in a batch and the predictions in the outputs of a model."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from lockstep.common.type_name import type_name
from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError

TARGETS: Final = ("labels", "targets", "target", "label")  # the first of these names in a batch is used
_OUTPUTS: Final = ("logits", "out")  # of transformers, and of torchvision's segmentation models


class Parts(NamedTuple):
    """The two parts of a batch: the inputs of the model's forward, and the targets."""

    inputs: Inputs
    targets: Any


def parts(batch: Batch) -> Parts:
    """Split a batch. The targets are the last item of a tuple or list, or the item of a mapping with a name in TARGETS.

    Raises UsageError if a batch has no targets.
    """
    if isinstance(batch, Mapping):
        name = next((key for key in TARGETS if key in batch), None)
        if name is None:
            raise UsageError(
                f"batch: no targets among {', '.join(map(str, batch))}; name the targets {', '.join(TARGETS[:-1])} or "
                f"{TARGETS[-1]}, or add a method inputs(batch) to the task"
            )
        return Parts({key: value for key, value in batch.items() if key != name}, batch[name])
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return Parts(tuple(batch[:-1]), batch[-1])
    raise UsageError(f"batch: expected (inputs, targets), or a mapping with the targets, got {_kind(batch)}")


def targets_of(batch: Batch) -> Tensor:
    """Return the targets of a batch. Raises UsageError unless they are a single tensor."""
    targets = parts(batch).targets
    if not isinstance(targets, Tensor):
        raise UsageError(f"batch: expected a single tensor of targets, got {_kind(targets)}")
    return targets


def targets_if_any(batch: Batch) -> Any:
    """Return the targets of a batch, or the whole batch if it doesn't consist of inputs and targets."""
    try:
        return parts(batch).targets
    except UsageError:
        return batch


def predictions(outputs: Any, model: str = "model") -> Tensor:
    """Return the tensor to compare with the targets: the outputs themselves, or their item `logits` or `out`.

    `model` is the name of the model in errors. Raises UsageError if there is no such tensor.
    """
    if isinstance(outputs, Tensor):
        return outputs
    # The ModelOutput of transformers is a mapping too.
    items = outputs if isinstance(outputs, Mapping) else {}
    prediction = next((items[name] for name in _OUTPUTS if name in items), getattr(outputs, "logits", None))
    if not isinstance(prediction, Tensor):
        raise UsageError(
            f"{model}: expected a tensor, or outputs with logits or out, got {_kind(outputs)}; return a tensor or a "
            f"mapping with logits, or wrap the model in a module that does"
        )
    return prediction


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type_name(value)} with {', '.join(map(str, value)) or 'no items'}"
    return type_name(value)
