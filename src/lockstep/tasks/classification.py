"""Classification, with cross entropy or a custom loss as a sum, and top-k accuracy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.common.own_code import OwnCode
from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError
from lockstep.tasks.base import Figures, Monitor, Report
from lockstep.tasks.batches import parts, predictions, targets_of
from lockstep.tasks.own_loss import PATH_MARK, Loss, check_sum, find_own_loss, sum_loss

SKIPPED: Final = -100  # the target of an unreadable sample, and ignore_index of F.cross_entropy
_TOLERANCE: Final = 1e-2  # for the sum of class weights, which may be rounded to bfloat16
_SHOWN: Final = 6  # values of a target in an error
_MOST_COPIES: Final = 256  # of a confusion matrix


@final
@dataclass(frozen=True)
class Classification:
    """A task whose outputs have shape [n, classes]. A batch is (inputs, targets), or a mapping with `labels`.

    Targets are int64 class indices of shape [n], where SKIPPED ignores a sample. Alternatively, targets are the weights
    of a mixture of classes: floats of shape [n, classes], where a row of zeros ignores a sample. If `own_loss` is None,
    the loss is cross entropy, and the loss of a sample is multiplied by the weight of its class in `class_weights`.
    `classes` are the names of the classes.
    """

    own_loss: Loss | None = None
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
        if self.own_loss is not None and self.label_smoothing:
            raise UsageError(
                f"recipe.loss.label_smoothing: {self.label_smoothing} is not supported with a custom loss; remove "
                f"it and smooth the labels in your function, or use cross_entropy"
            )
        if self.own_loss is not None and self.class_weights:
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
        return parts(batch).inputs

    def weight(self, batch: Batch) -> int:
        """See Task."""
        return len(targets_of(batch))

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        return self.loss_sum(predictions(outputs, self.model_name), targets_of(batch))

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over the samples: a 0-dim tensor.

        If a custom loss returns one value per sample, the values are summed. A scalar is used as the sum.
        """
        if self.own_loss is not None:
            return sum_loss(self.own_loss(outputs, targets), outputs)
        with OwnCode(f"{self.model_name}: cross entropy of the outputs"):
            return cross_entropy_sum(outputs, targets, self.label_smoothing, self._device_weights(outputs))

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return `counted`, the number of samples with a target, and `correct<k>` for each k: 0-dim int64 tensors.

        In a mixture of classes, the class with the largest weight is the correct class.
        """
        truth, counted = truth_of(targets_of(batch))
        scores = predictions(outputs, self.model_name)
        guesses = scores.topk(min(max(self.topk, default=1), scores.shape[1]), dim=1).indices
        hits = (guesses == truth[:, None]) & counted[:, None]
        correct = {f"correct{k}": hits[:, :k].sum() for k in self.topk}
        return {**correct, "counted": counted.sum()}

    def figures(self, sums: Mapping[str, Tensor]) -> Figures:
        """Return the mean loss and the top-k accuracies over the samples that aren't ignored."""
        counted = max(int(sums["counted"]), 1)
        shares = {f"top{k}": int(sums[f"correct{k}"]) / counted for k in self.topk}
        return {"loss": float(sums["loss"]) / counted, **shares}

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return `confusion`: int64 of shape [classes, classes], with a row per target and a column per prediction."""
        truth, counted = truth_of(targets_of(batch))
        scores = predictions(outputs, self.model_name)
        return {"confusion": confusion(truth, scores.argmax(1), scores.shape[1], counted)}

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        """Return the accuracy of each class, or None if it has no samples, and the confusion matrix."""
        matrix = sums["confusion"]
        names = self.classes or tuple(map(str, range(len(matrix))))
        pairs = zip(matrix.diag().tolist(), matrix.sum(1).tolist(), strict=True)
        shares = [correct / total if total else None for correct, total in pairs]
        return {"accuracy": dict(zip(names, shares, strict=True)), "confusion": matrix.tolist()}

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task."""
        targets = targets_of(batch)
        scores, name = predictions(outputs, self.model_name), self.model_name.removeprefix("model ")
        check_outputs(name, len(self.classes), scores, len(targets))
        if self.own_loss is not None:
            check_loss(self.own_loss, len(self.classes), targets)

    def _device_weights(self, outputs: Tensor) -> Tensor | None:
        """Return the class weights on the device of the outputs. They are copied only once."""
        if not self.class_weights:
            return None
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        if (outputs.device, dtype) not in self._weight_cache:
            self._weight_cache[outputs.device, dtype] = torch.tensor(
                self.class_weights, device=outputs.device, dtype=dtype
            )
        return self._weight_cache[outputs.device, dtype]


def confusion(truth: Tensor, guess: Tensor, classes: int, counted: Tensor) -> Tensor:
    """Return the confusion matrix: int64 of shape [classes, classes], a row per target and a column per prediction.

    Items that aren't `counted` are added to an extra cell, which is dropped. Boolean indexing, or the maximum that
    bincount computes, would synchronize with the device.
    """
    size = classes**2 + 1
    cells = torch.where(counted, truth * classes + guess, size - 1).flatten()
    # Count into several matrices and sum them at the end. The deterministic kernel of CUDA uses one warp per cell, and
    # most pixels fall into few cells. The matrices together have hardly more cells than there are predictions.
    copies = min(_MOST_COPIES, 1 + len(cells) // size)
    positions = cells + size * (torch.arange(len(cells), device=cells.device) % copies)
    sums = torch.zeros(copies * size, dtype=torch.int64, device=cells.device)
    sums.scatter_add_(0, positions, torch.ones_like(positions))
    return sums.reshape(copies, size).sum(0)[:-1].reshape(classes, classes)


def truth_of(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class of each sample, and whether the sample counts: int64 and bool of shape [n].

    In a mixture, this is the class with the largest weight.
    """
    if targets.is_floating_point():
        return targets.argmax(dim=1), targets.sum(dim=1) > 0
    return targets, targets != SKIPPED


def skip_mask(batch: Batch) -> Tensor:
    """Return which samples of a batch are ignored: bool of shape [n]. All False if targets aren't class indices."""
    targets = targets_of(batch)
    is_class_index = targets.ndim == 1 and not targets.is_floating_point()
    return targets == SKIPPED if is_class_index else torch.zeros(len(targets), dtype=torch.bool)


def find_loss(name: str) -> Loss | None:
    """Return the loss that a recipe names: None for cross entropy, or the function at `package.module:function`."""
    if name == "cross_entropy":
        return None
    if PATH_MARK not in name:
        raise UsageError(f"loss {name}: no such loss; use cross_entropy or package.module:function")
    return find_own_loss(name)


def check_loss(loss: Loss, classes: int, targets: Tensor) -> None:
    """Raise UsageError unless `loss` returns a sum or one value per sample, tested with two equal samples.

    The first target that isn't ignored is the target of both.
    """
    counted = truth_of(targets)[1]
    target = targets[counted][:1] if counted.any() else targets[:1]
    check_sum(loss, torch.linspace(-1.0, 1.0, classes)[None], target)


def check_targets(label: str, targets: Tensor, samples: Sequence[int], classes: int) -> None:
    """Raise UsageError unless targets are valid for Classification. `samples` are their indices in dataset `label`."""
    floating = targets.is_floating_point()
    if targets.shape[1:] != ((classes,) if floating else ()):
        problem = f"target has shape {list(targets.shape[1:])} and {targets.dtype}"
        raise UsageError(f"{label} sample {samples[0]}: {problem}; {_target_rule(classes)}")
    if floating:
        is_no_mixture = ((targets.sum(1) - 1).abs() > _TOLERANCE) & (targets != 0).any(1)
        invalid = (targets < 0).any(1) | ~targets.isfinite().all(1) | is_no_mixture
    else:
        invalid = ((targets < 0) | (targets >= classes)) & (targets != SKIPPED)
    if invalid.any():
        index = int(invalid.nonzero()[0])
        problem = f"target is {_format_target(targets[index])}"
        raise UsageError(f"{label} sample {samples[index]}: {problem}; {_target_rule(classes)}")


def check_outputs(name: str, classes: int, outputs: Tensor, samples: int) -> None:
    """Raise UsageError unless the outputs of model `name` are floats of shape [samples, classes]."""
    if outputs.shape != (samples, classes):
        raise UsageError(
            f"model {name}: expected outputs of shape {(samples, classes)} for {samples} samples and {classes} "
            f"classes, got {tuple(outputs.shape)}; set the number of classes of the model to {classes} (your own "
            f"function gets it as num_classes if it has that parameter)"
        )
    if not outputs.is_floating_point():
        raise UsageError(f"model {name}: expected float outputs, got {outputs.dtype}; return one float per class")


def cross_entropy_sum(
    outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0, weights: Tensor | None = None
) -> Tensor:
    """Return the cross entropy summed over samples, in at least float32. `weights` are the class weights."""
    if outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()
    if targets.is_floating_point():
        # F.cross_entropy would also smooth a row of zeros, so that an ignored sample would count.
        targets = targets.to(outputs.dtype)
        smooth = targets * (1 - label_smoothing) + targets.sum(dim=1, keepdim=True) * (
            label_smoothing / targets.shape[1]
        )
        return F.cross_entropy(outputs, smooth, weight=weights, reduction="sum")
    return F.cross_entropy(
        outputs, targets, weight=weights, ignore_index=SKIPPED, reduction="sum", label_smoothing=label_smoothing
    )


def _target_rule(classes: int) -> str:
    return (
        f"for classification with {classes} classes, use an integer from 0 to {classes - 1}, or {classes} non-negative "
        f"floats with a sum of 1"
    )


def _format_target(target: Tensor) -> str:
    values = [f"{value:.6g}" for value in target.flatten()[:_SHOWN].tolist()]
    ellipsis = ", ..." if target.numel() > _SHOWN else ""
    return f"[{', '.join(values)}{ellipsis}]" if target.ndim else values[0]
