"""What a batch and a model's outputs usually look like: which part is the targets, and which tensor the predictions."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError

TARGETS: Final = ("labels", "targets", "target", "label")  # of these names, the first that a batch has
_OUTPUTS: Final = ("logits", "out")  # transformers', and that of torchvision's segmentation models


class Parts(NamedTuple):
    """A batch split in two: the inputs of the model's forward, and the targets."""

    inputs: Inputs
    targets: Any


def parts(batch: Batch) -> Parts:
    """Split a batch: of a tuple the last is the targets, of a mapping what is called `labels` or `targets`."""
    if isinstance(batch, Mapping):
        name = next((each for each in TARGETS if each in batch), None)
        if name is None:
            raise UsageError(
                f"a batch has {', '.join(map(str, batch))}; call the targets one of {', '.join(TARGETS)}, or give the "
                f"task a method inputs(batch)"
            )
        return Parts({key: value for key, value in batch.items() if key != name}, batch[name])
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return Parts(tuple(batch[:-1]), batch[-1])
    raise UsageError(f"a batch is {_kind(batch)}; expected (inputs, targets), or a mapping of names with the targets")


def targets_of(batch: Batch) -> Tensor:
    """Return the targets of a batch, one tensor."""
    targets = parts(batch).targets
    if not isinstance(targets, Tensor):
        raise UsageError(f"the targets of a batch are {_kind(targets)}; expected one tensor")
    return targets


def targets_if_any(batch: Batch) -> Any:
    """Return the targets of a batch, and all of one that is not made of inputs and targets."""
    try:
        return parts(batch).targets
    except UsageError:
        return batch


def predictions(outputs: Any, model: str = "model") -> Tensor:
    """Return the tensor to compare with the targets: the outputs of `model`, or what they call `logits` or `out`."""
    if isinstance(outputs, Tensor):
        return outputs
    # A ModelOutput of transformers is a mapping too.
    named = outputs if isinstance(outputs, Mapping) else {}
    found = next((named[name] for name in _OUTPUTS if name in named), getattr(outputs, "logits", None))
    if not isinstance(found, Tensor):
        names = f" (it has {', '.join(map(str, outputs))})" if isinstance(outputs, Mapping) else ""
        raise UsageError(
            f"{model}: its output is of type {type(outputs).__name__}, not one tensor, and has neither logits nor "
            f"out{names}; return one tensor, or a mapping with logits, by a function of yours around it if need be"
        )
    return found


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value)) or 'nothing'}"
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"of type {type(value).__name__}{length}"
