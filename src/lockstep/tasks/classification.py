"""Classification with cross entropy or a custom loss, and with top-k accuracy as the metric."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.common.user_code import UserCode
from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError
from lockstep.tasks.base import MetricValues, Monitor, TaskReport
from lockstep.tasks.batches import get_predictions, get_targets, split_batch
from lockstep.tasks.custom_loss import PATH_MARK, Loss, check_is_sum, import_custom_loss, sum_loss

SKIPPED: Final = -100  # target of an unreadable sample; the default ignore_index of F.cross_entropy
_TOLERANCE: Final = 1e-2  # tolerance for the sum of mixture weights, which may be rounded to bfloat16
_MAX_SHOWN: Final = 6  # maximum number of values of a target in an error message
_MAX_COPIES: Final = 256  # maximum number of copies of the confusion matrix


@final
@dataclass(frozen=True)
class Classification:
    """A task whose outputs have shape [n, classes]. A batch is (inputs, targets), or a mapping with `labels`.

    Targets are one of:
    - Class indices, int64 of shape [n]. Samples with the target SKIPPED are ignored.
    - Weights for a mixture of classes, floats of shape [n, classes]. Samples with a row of zeros are ignored.

    `classes` contains the class names. If `custom_loss` is None, the loss is cross entropy, and the loss of each sample
    is multiplied by the weight of its class in `class_weights`.
    """

    custom_loss: Loss | None = None
    label_smoothing: float = 0.0
    topk: tuple[int, ...] = (1, 5)
    model_name: str = "model"
    classes: tuple[str, ...] = ()
    class_weights: tuple[float, ...] = ()
    counts_samples: ClassVar[bool] = True
    unit: ClassVar[str] = "samples"
    _weight_cache: dict[tuple[torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.custom_loss is not None and self.label_smoothing:
            raise UsageError(
                f"recipe.loss.label_smoothing: {self.label_smoothing} is not supported with a custom loss; remove "
                f"it and smooth the labels in your function, or use cross_entropy"
            )
        if self.custom_loss is not None and self.class_weights:
            raise UsageError(
                "recipe.task.weights: not supported with a custom loss; remove it, and weight the classes in your "
                "function"
            )
        if self.class_weights and len(self.class_weights) != len(self.classes):
            raise UsageError(
                f"recipe.task.weights: {len(self.class_weights)} weights for {len(self.classes)} classes; set one "
                f"weight per class"
            )
        if any(not 0 <= weight < math.inf for weight in self.class_weights):
            raise UsageError(f"recipe.task.weights: must be finite and not negative, got {list(self.class_weights)}")

    @property
    def fractions(self) -> tuple[str, ...]:
        """See Task."""
        return tuple(f"top{k}" for k in self.topk)

    @property
    def monitor(self) -> Monitor:
        """See Task."""
        return Monitor(self.fractions[0], higher=True)

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        return split_batch(batch).inputs

    def weight(self, batch: Batch) -> int:
        """See Task."""
        return len(get_targets(batch))

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        return self.loss_sum(get_predictions(outputs, self.model_name), get_targets(batch))

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over the samples, as a 0-dim tensor.

        If a custom loss returns a value for each sample, the values are summed. A 0-dim value is already the sum.
        """
        if self.custom_loss is not None:
            return sum_loss(self.custom_loss(outputs, targets), outputs)
        with UserCode(f"{self.model_name}: cross entropy of the outputs"):
            return sum_cross_entropy(outputs, targets, self.label_smoothing, self._get_device_weights(outputs))

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the number of samples that aren't ignored as `counted`, and the number of top-k hits as `correct<k>`.

        All values are 0-dim int64 tensors. For a mixture of classes, the class with the largest weight is correct.
        """
        truth, counted = get_target_classes(get_targets(batch))
        scores = get_predictions(outputs, self.model_name)
        guesses = scores.topk(min(max(self.topk, default=1), scores.shape[1]), dim=1).indices
        hits = (guesses == truth[:, None]) & counted[:, None]
        correct = {f"correct{k}": hits[:, :k].sum() for k in self.topk}
        return {**correct, "counted": counted.sum()}

    def figures(self, sums: Mapping[str, Tensor]) -> MetricValues:
        """Return the mean loss and the top-k accuracies over the samples that aren't ignored."""
        counted = max(int(sums["counted"]), 1)
        accuracies = {f"top{k}": int(sums[f"correct{k}"]) / counted for k in self.topk}
        return {"loss": float(sums["loss"]) / counted, **accuracies}

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the confusion matrix as `confusion`: int64 of shape [classes (target), classes (prediction)]."""
        truth, counted = get_target_classes(get_targets(batch))
        scores = get_predictions(outputs, self.model_name)
        return {"confusion": compute_confusion(truth, scores.argmax(1), scores.shape[1], counted)}

    def report(self, sums: Mapping[str, Tensor]) -> TaskReport:
        """Return the confusion matrix, and the accuracy of each class, which is None for classes without samples."""
        matrix = sums["confusion"]
        names = self.classes or tuple(map(str, range(len(matrix))))
        pairs = zip(matrix.diag().tolist(), matrix.sum(1).tolist(), strict=True)
        accuracies = [correct / total if total else None for correct, total in pairs]
        return {"accuracy": dict(zip(names, accuracies, strict=True)), "confusion": matrix.tolist()}

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task."""
        targets = get_targets(batch)
        scores, name = get_predictions(outputs, self.model_name), self.model_name.removeprefix("model ")
        check_outputs(name, len(self.classes), scores, len(targets))
        if self.custom_loss is not None:
            check_loss(self.custom_loss, len(self.classes), targets)

    def _get_device_weights(self, outputs: Tensor) -> Tensor | None:
        """Return the class weights on the device of `outputs`. The tensor is cached."""
        if not self.class_weights:
            return None
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        if (outputs.device, dtype) not in self._weight_cache:
            self._weight_cache[outputs.device, dtype] = torch.tensor(
                self.class_weights, device=outputs.device, dtype=dtype
            )
        return self._weight_cache[outputs.device, dtype]


def compute_confusion(targets: Tensor, predictions: Tensor, num_classes: int, is_counted: Tensor) -> Tensor:
    """Return the confusion matrix, int64 of shape [num_classes (target), num_classes (prediction)].

    Items outside the mask `is_counted` are added to an extra cell, which is dropped at the end. This avoids boolean
    indexing and torch.bincount, which would synchronize with the device.
    """
    size = num_classes**2 + 1
    cells = torch.where(is_counted, targets * num_classes + predictions, size - 1).flatten()
    # Count in several copies of the matrix, and sum the copies at the end. A single matrix would be slow, because
    # CUDA's deterministic scatter_add_ uses one warp per cell, and most pixels are in few cells. Limit the number of
    # copies, so that they have about as many cells as there are predictions.
    copies = min(_MAX_COPIES, 1 + len(cells) // size)
    positions = cells + size * (torch.arange(len(cells), device=cells.device) % copies)
    sums = torch.zeros(copies * size, dtype=torch.int64, device=cells.device)
    sums.scatter_add_(0, positions, torch.ones_like(positions))
    return sums.reshape(copies, size).sum(0)[:-1].reshape(num_classes, num_classes)


def get_target_classes(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class of each sample, int64 of shape [n], and a mask of samples to count, bool of shape [n].

    The class of a mixture is the class with the largest weight.
    """
    if targets.is_floating_point():
        return targets.argmax(dim=1), targets.sum(dim=1) > 0
    return targets, targets != SKIPPED


def compute_skip_mask(batch: Batch) -> Tensor:
    """Return a mask of skipped samples, bool of shape [n]. It is all False if the targets aren't class indices."""
    targets = get_targets(batch)
    is_class_index = targets.ndim == 1 and not targets.is_floating_point()
    return targets == SKIPPED if is_class_index else torch.zeros(len(targets), dtype=torch.bool)


def find_loss(name: str) -> Loss | None:
    """Return the loss function at the import path `name`, or None for `cross_entropy`."""
    if name == "cross_entropy":
        return None
    if PATH_MARK not in name:
        raise UsageError(f"loss {name}: no such loss; use cross_entropy or package.module:function")
    return import_custom_loss(name)


def check_loss(loss: Loss, num_classes: int, targets: Tensor) -> None:
    """Raise UsageError if `loss` returns neither a sum nor a value for each sample.

    The loss is tested with two identical samples, whose target is the first target in `targets` that isn't ignored.
    """
    counted = get_target_classes(targets)[1]
    target = targets[counted][:1] if counted.any() else targets[:1]
    check_is_sum(loss, torch.linspace(-1.0, 1.0, num_classes)[None], target)


def check_targets(label: str, targets: Tensor, sample_indices: Sequence[int], num_classes: int) -> None:
    """Raise UsageError if a target isn't valid for Classification.

    The message contains `label` (the name of the dataset) and the index of the sample from `sample_indices`.
    """
    floating = targets.is_floating_point()
    if targets.shape[1:] != ((num_classes,) if floating else ()):
        problem = f"target has shape {list(targets.shape[1:])} and {targets.dtype}"
        raise UsageError(f"{label} sample {sample_indices[0]}: {problem}; {_describe_valid_targets(num_classes)}")
    if floating:
        has_wrong_sum = ((targets.sum(1) - 1).abs() > _TOLERANCE) & (targets != 0).any(1)
        invalid = (targets < 0).any(1) | ~targets.isfinite().all(1) | has_wrong_sum
    else:
        invalid = ((targets < 0) | (targets >= num_classes)) & (targets != SKIPPED)
    if invalid.any():
        index = int(invalid.nonzero()[0])
        problem = f"target is {_format_target(targets[index])}"
        raise UsageError(f"{label} sample {sample_indices[index]}: {problem}; {_describe_valid_targets(num_classes)}")


def check_outputs(name: str, num_classes: int, outputs: Tensor, num_samples: int) -> None:
    """Raise UsageError if the outputs of the model `name` aren't floats of shape [num_samples, num_classes]."""
    if outputs.shape != (num_samples, num_classes):
        raise UsageError(
            f"model {name}: expected outputs of shape {(num_samples, num_classes)} for {num_samples} samples and "
            f"{num_classes} classes, got {tuple(outputs.shape)}; set the number of classes of the model to "
            f"{num_classes} (your own function gets it as num_classes if it has that parameter)"
        )
    if not outputs.is_floating_point():
        raise UsageError(f"model {name}: expected float outputs, got {outputs.dtype}; return one float per class")


def sum_cross_entropy(
    outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0, weights: Tensor | None = None
) -> Tensor:
    """Return the cross entropy summed over samples, computed in at least float32. `weights` are the class weights."""
    if outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()
    if targets.is_floating_point():
        # Don't pass label_smoothing to F.cross_entropy, because it would also smooth the zeros of an ignored sample.
        targets = targets.to(outputs.dtype)
        smooth = targets * (1 - label_smoothing) + targets.sum(dim=1, keepdim=True) * (
            label_smoothing / targets.shape[1]
        )
        return F.cross_entropy(outputs, smooth, weight=weights, reduction="sum")
    return F.cross_entropy(
        outputs, targets, weight=weights, ignore_index=SKIPPED, reduction="sum", label_smoothing=label_smoothing
    )


def _describe_valid_targets(num_classes: int) -> str:
    return (
        f"for classification with {num_classes} classes, use an integer from 0 to {num_classes - 1}, or {num_classes} "
        "non-negative floats with a sum of 1"
    )


def _format_target(target: Tensor) -> str:
    values = [f"{value:.6g}" for value in target.flatten()[:_MAX_SHOWN].tolist()]
    ellipsis = ", ..." if target.numel() > _MAX_SHOWN else ""
    return f"[{', '.join(values)}{ellipsis}]" if target.ndim else values[0]
