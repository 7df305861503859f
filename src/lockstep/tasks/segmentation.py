"""Semantic segmentation with cross entropy per pixel, and with intersection over union as the metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor

from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError
from lockstep.tasks.base import MetricValues, Monitor, TaskReport
from lockstep.tasks.batches import get_predictions, get_targets, split_batch
from lockstep.tasks.classification import SKIPPED, compute_confusion, sum_cross_entropy

_AUXILIARY: Final = "aux"  # key of the auxiliary head's outputs in torchvision models
_AUXILIARY_WEIGHT: Final = 0.5  # default weight of the auxiliary loss


@final
@dataclass(frozen=True)
class Segmentation:
    """A task whose outputs have shape [n, classes, height, width]. Targets are integers of shape [n, height, width].

    The weight of a batch is its number of pixels, excluding pixels of the class `ignore`. If the model also returns
    outputs named `aux`, as torchvision models do, their loss is multiplied by `auxiliary` and added to the loss.
    """

    classes: tuple[str, ...]
    ignore: int = 255
    auxiliary: float = _AUXILIARY_WEIGHT
    model_name: str = "model"
    counts_samples: ClassVar[bool] = False
    unit: ClassVar[str] = "pixels"
    fractions: ClassVar[tuple[str, ...]] = ("miou", "pixel_accuracy")
    monitor: ClassVar[Monitor] = Monitor("miou", higher=True)

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        return split_batch(batch).inputs

    def weight(self, batch: Batch) -> int:
        """See Task."""
        return int((self._get_targets(batch) != SKIPPED).sum())

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        targets = self._get_targets(batch)
        loss = sum_cross_entropy(get_predictions(outputs, self.model_name), targets)
        if self.auxiliary and _has_auxiliary(outputs):
            loss = loss + self.auxiliary * sum_cross_entropy(outputs[_AUXILIARY], targets)
        return loss

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the confusion matrix as `confusion`: int64 of shape [classes (target), classes (prediction)]."""
        targets, scores = self._get_targets(batch), get_predictions(outputs, self.model_name)
        return {"confusion": compute_confusion(targets, scores.argmax(1), scores.shape[1], targets != SKIPPED)}

    def figures(self, sums: Mapping[str, Tensor]) -> MetricValues:
        """Return the mean intersection over union of the classes that occur, and the pixel accuracy."""
        matrix = sums["confusion"]
        overlaps = [overlap for overlap in _compute_iou(matrix) if overlap is not None]
        return {
            "miou": sum(overlaps) / max(len(overlaps), 1),
            "pixel_accuracy": int(matrix.diag().sum()) / max(int(matrix.sum()), 1),
        }

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        return {}

    def report(self, sums: Mapping[str, Tensor]) -> TaskReport:
        """Return the confusion matrix, and the intersection over union of each class, which is None if undefined."""
        matrix = sums["confusion"]
        names = self.classes or tuple(map(str, range(len(matrix))))
        return {"iou": dict(zip(names, _compute_iou(matrix), strict=True)), "confusion": matrix.tolist()}

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task."""
        targets, scores = get_targets(batch), get_predictions(outputs, self.model_name)
        expected_shape = (len(targets), len(self.classes), *targets.shape[1:])
        if targets.is_floating_point() or targets.ndim != 3:
            raise UsageError(
                f"targets: expected integers of shape [height, width] per sample, got {targets.dtype} of shape "
                f"{list(targets.shape[1:])}; return the class of each pixel"
            )
        if scores.shape != expected_shape or not scores.is_floating_point():
            raise UsageError(
                f"{self.model_name}: expected floats of shape {list(expected_shape)}, got {scores.dtype} of shape "
                f"{list(scores.shape)}; return one value for each of {len(self.classes)} classes at each pixel"
            )
        # In evaluation mode, the outputs have no gradient, and many models return no auxiliary outputs.
        if self.auxiliary not in (0, _AUXILIARY_WEIGHT) and scores.requires_grad and not _has_auxiliary(outputs):
            raise UsageError(
                f"recipe.task.auxiliary: {self.auxiliary:g} has no effect, because {self.model_name} returns no "
                f"outputs named {_AUXILIARY} in training mode; remove it, or use a model with an auxiliary head "
                f"(aux_loss: true in recipe.model.options for a model of torchvision)"
            )
        classes = self._get_targets(batch)
        invalid = classes[(classes != SKIPPED) & ((classes < 0) | (classes >= len(self.classes)))]
        if len(invalid):
            raise UsageError(
                f"targets: a pixel has the class {int(invalid[0])}; use 0 to {len(self.classes) - 1}, or {self.ignore} "
                f"(recipe.task.ignore) for pixels to ignore"
            )

    def _get_targets(self, batch: Batch) -> Tensor:
        targets = get_targets(batch).long()
        return torch.where(targets == self.ignore, SKIPPED, targets)


def segmentation(
    model: str, classes: tuple[str, ...], ignore: int = 255, auxiliary: float = _AUXILIARY_WEIGHT
) -> Segmentation:
    """Create the task from recipe options."""
    if auxiliary < 0:
        raise UsageError(
            f"recipe.task.auxiliary: must not be negative, got {auxiliary}; use 0 to ignore the auxiliary head"
        )
    return Segmentation(classes, ignore, auxiliary, model)


def _has_auxiliary(outputs: Any) -> bool:
    return isinstance(outputs, Mapping) and _AUXILIARY in outputs


def _compute_iou(matrix: Tensor) -> list[float | None]:
    """Return the intersection over union of each class, or None for classes in neither targets nor predictions."""
    intersections = matrix.diag()
    unions = matrix.sum(0) + matrix.sum(1) - intersections
    return [
        intersection / union if union else None
        for intersection, union in zip(intersections.tolist(), unions.tolist(), strict=True)
    ]
