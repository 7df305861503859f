"""Extracts the targets from a batch, and the predictions from the outputs of a model."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from lockstep.common.type_name import describe_type
from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError

TARGETS: Final = ("labels", "targets", "target", "label")  # names of targets in a batch, in order of precedence
_OUTPUTS: Final = ("logits", "out")  # names of outputs in transformers, and in segmentation models of torchvision


class SplitBatch(NamedTuple):
    """A batch, split into the arguments of the model's forward method and the targets."""

    inputs: Inputs
    targets: Any


def split_batch(batch: Batch) -> SplitBatch:
    """Split a batch into inputs and targets. Raises UsageError if it has no targets.

    The targets are the last item of a tuple or list, or the item of a mapping whose name is in TARGETS.
    """
    if isinstance(batch, tuple | list) and len(batch) > 1:  # first, because a check against Mapping takes 1 us
        return SplitBatch(tuple(batch[:-1]), batch[-1])
    if isinstance(batch, Mapping):
        name = next((key for key in TARGETS if key in batch), None)
        if name is None:
            raise UsageError(
                f"batch: no targets among {', '.join(map(str, batch))}; name the targets {', '.join(TARGETS[:-1])} or "
                f"{TARGETS[-1]}, or add a method inputs(batch) to the task"
            )
        return SplitBatch({key: value for key, value in batch.items() if key != name}, batch[name])
    raise UsageError(f"batch: expected (inputs, targets), or a mapping with the targets, got {_describe_type(batch)}")


def get_targets(batch: Batch) -> Tensor:
    """Return the targets of a batch. Raises UsageError if they aren't a single tensor."""
    targets = split_batch(batch).targets
    if not isinstance(targets, Tensor):
        raise UsageError(f"batch: expected a single tensor of targets, got {_describe_type(targets)}")
    return targets


def get_targets_or_batch(batch: Batch) -> Any:
    """Return the targets of a batch, or the batch itself if it has no targets."""
    try:
        return split_batch(batch).targets
    except UsageError:
        return batch


def get_predictions(outputs: Any, model: str = "model") -> Tensor:
    """Return the tensor to compare with the targets, which is `outputs` itself or its item `logits` or `out`.

    `model` is the name of the model for error messages. Raises UsageError if there is no such tensor.
    """
    if isinstance(outputs, Tensor):
        return outputs
    # This includes the ModelOutput of transformers, which is a mapping.
    items = outputs if isinstance(outputs, Mapping) else {}
    prediction = next((items[name] for name in _OUTPUTS if name in items), getattr(outputs, "logits", None))
    if not isinstance(prediction, Tensor):
        raise UsageError(
            f"{model}: expected a tensor, or outputs with logits or out, got {_describe_type(outputs)}; return a "
            f"tensor or a mapping with logits, or wrap the model in a module that does"
        )
    return prediction


def _describe_type(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{describe_type(value)} with {', '.join(map(str, value)) or 'no items'}"
    return describe_type(value)
