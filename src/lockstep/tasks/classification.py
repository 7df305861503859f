"""Classification: cross entropy or the user's loss as a sum, and how often the truth is among k guesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError
from lockstep.importing import import_object
from lockstep.own_code import OwnCode
from lockstep.tasks.base import Figures, Monitor, scores

Loss = Callable[[Tensor, Tensor], Tensor]

SKIPPED: Final = -100  # the target of a sample that could not be read: F.cross_entropy's ignore_index
_TOLERANCE: Final = 1e-2  # of the sum of a mixture, which may have been rounded to bfloat16
_SHOWN: Final = 6  # values of a target


@final
@dataclass(frozen=True)
class Classification:
    """A task whose outputs have shape [n, classes]; a batch is (inputs, targets).

    Targets are int64 of shape [n], with SKIPPED for a sample that counts as nothing, or the weights of a
    mixture of classes: floats of shape [n, classes], where a row of zeros counts as nothing. `own_loss` None is
    cross entropy.
    """

    own_loss: Loss | None = None
    label_smoothing: float = 0.0
    topk: tuple[int, ...] = (1, 5)
    model_name: str = "model"

    def __post_init__(self) -> None:
        if self.own_loss is not None and self.label_smoothing:
            raise UsageError(
                f"loss: label_smoothing is {self.label_smoothing}, but the loss is a function of yours; "
                f"smooth in that function and leave label_smoothing out, or use cross_entropy"
            )

    @property
    def counts_samples(self) -> bool:
        """See Task."""
        return True

    @property
    def unit(self) -> str:
        """See Task."""
        return "samples"

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
        return (batch[0],)

    def weight(self, batch: Batch) -> int:
        """See Task."""
        return len(batch[1])

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        return self.loss_sum(scores(outputs), batch[1])

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss added over the samples: a 0-dim tensor.

        A user's loss that returns one value for each sample is added up here; a scalar is taken as their sum.
        """
        if self.own_loss is None:
            with OwnCode(f"{self.model_name}: the cross entropy of its outputs"):
                return cross_entropy_sum(outputs, targets, self.label_smoothing)
        loss = _summed(self.own_loss(outputs, targets), len(targets))
        if outputs.requires_grad and not loss.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                "loss: it carries no gradient; compute it from the outputs by torch's functions alone, without detach()"
            )
        return loss

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return `counted`, the samples with a target, and `correct<k>` for each k: 0-dim int64 tensors.

        With a mixture of classes the heaviest one is the truth.
        """
        truth, counted = _truth(batch[1])
        hits = _hits(scores(outputs), truth, max(self.topk, default=1)) & counted[:, None]
        correct = {f"correct{k}": hits[:, :k].sum() for k in self.topk}
        return {**correct, "counted": counted.sum()}

    def figures(self, sums: Mapping[str, Tensor]) -> Figures:
        """Return the loss over the samples that count, and how often the truth was among k guesses."""
        counted = max(int(sums["counted"]), 1)
        shares = {f"top{k}": int(sums[f"correct{k}"]) / counted for k in self.topk}
        return {"loss": float(sums["loss"]) / counted, **shares}


def skipped_samples(batch: Batch) -> Tensor:
    """Return which samples of a batch count as nothing: bool of shape [n]; none of a mixture of classes."""
    targets: Tensor = batch[1]
    return torch.zeros(len(targets), dtype=torch.bool) if targets.is_floating_point() else targets == SKIPPED


def find_loss(name: str) -> Loss | None:
    """Return the loss that a recipe names: None for cross entropy, else what `package.module:function` is."""
    if name == "cross_entropy":
        return None
    if ":" not in name:
        raise UsageError(f"loss {name}: there is no such loss; use cross_entropy or package.module:function")
    loss = import_object(name, "loss")
    if not callable(loss):
        raise UsageError(f"loss {name}: it is of type {type(loss).__name__}; name a function of outputs and targets")
    code = OwnCode(f"loss {name}")

    def called(outputs: Tensor, targets: Tensor) -> Tensor:
        with code:
            value: Tensor = loss(outputs, targets)
            return value

    return called


def check_loss(loss: Loss, classes: int, targets: Tensor) -> None:
    """Raise UsageError unless `loss` gives a sum or one value for each sample, as two equal samples tell.

    With a mean the size of a micro-batch would decide the weight of its samples. The first of `targets` that counts
    is the target of both.
    """
    counted = _truth(targets)[1]
    target = targets[counted][:1] if counted.any() else targets[:1]
    outputs, targets = torch.linspace(-1.0, 1.0, classes).expand(2, classes).contiguous(), torch.cat([target, target])
    given = outputs.clone(), targets.clone()
    both, one = loss(outputs, targets), loss(outputs[:1], targets[:1])
    if not (torch.equal(outputs, given[0]) and torch.equal(targets, given[1])):
        raise UsageError("loss: the function changes what it is given, which is used again; let it work on copies")
    twice, once = _summed(both, 2), _summed(one, 1)
    if both.ndim == 0 and once != 0 and torch.isclose(twice, once):
        raise UsageError(
            f"loss: two equal samples give {twice.item():.6g}, one alone {once.item():.6g}: that is a mean; "
            f"return the sum, as with reduction='sum', or one value for each sample, as with reduction='none'"
        )


def check_targets(label: str, targets: Tensor, samples: Sequence[int], classes: int) -> None:
    """Raise UsageError unless `targets` are what a Classification takes; `samples` are their numbers in `label`."""
    floating = targets.is_floating_point()
    if targets.shape[1:] != ((classes,) if floating else ()):
        found = f"its target has shape {list(targets.shape[1:])} and {targets.dtype}"
        raise UsageError(f"{label} sample {samples[0]}: {found}; {_expected(classes)}")
    if floating:
        no_mixture = ((targets.sum(1) - 1).abs() > _TOLERANCE) & (targets != 0).any(1)
        wrong = (targets < 0).any(1) | ~targets.isfinite().all(1) | no_mixture
    else:
        wrong = ((targets < 0) | (targets >= classes)) & (targets != SKIPPED)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        found = f"its target is {_shown(targets[first])}"
        raise UsageError(f"{label} sample {samples[first]}: {found}; {_expected(classes)}")


def check_outputs(name: str, classes: int, outputs: object, samples: int) -> None:
    """Raise UsageError unless `outputs` of the model `name` are floats of shape [samples, classes]."""
    outputs = scores(outputs)
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"model {name}: its output is of type {type(outputs).__name__}, not one tensor; "
            f"choose options without further outputs, or wrap it in a function of yours"
        )
    if outputs.shape != (samples, classes):
        raise UsageError(
            f"model {name} gives outputs of shape {tuple(outputs.shape)} for {samples} samples, but the data "
            f"has {classes} classes; set its number of classes to {classes} (a function of yours is given it "
            f"as num_classes where it has that parameter)"
        )
    if not outputs.is_floating_point():
        raise UsageError(f"model {name}: its outputs are of {outputs.dtype}; return one float for each class")


def cross_entropy_sum(outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy added over samples, in float32 at least."""
    if outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()
    if targets.is_floating_point():
        return F.cross_entropy(outputs, _smooth(targets.to(outputs.dtype), label_smoothing), reduction="sum")
    return F.cross_entropy(outputs, targets, ignore_index=SKIPPED, reduction="sum", label_smoothing=label_smoothing)


def _expected(classes: int) -> str:
    return (
        f"only classification is trained so far, and the data has {classes} classes: a target is a whole number from 0 "
        f"to {classes - 1}, or {classes} floats, none negative, whose sum is 1"
    )


def _shown(target: Tensor) -> str:
    values = [f"{value:.6g}" for value in target.flatten()[:_SHOWN].tolist()]
    more = ", ..." if target.numel() > _SHOWN else ""
    return f"[{', '.join(values)}{more}]" if target.ndim else values[0]


def _smooth(targets: Tensor, smoothing: float) -> Tensor:
    # F.cross_entropy would also smooth a row of zeros, and a skipped sample would then count.
    return targets * (1 - smoothing) + targets.sum(dim=1, keepdim=True) * (smoothing / targets.shape[1])


def _summed(loss: Tensor, samples: int) -> Tensor:
    if not isinstance(loss, Tensor):
        raise UsageError(f"loss: the function returned {type(loss).__name__}; return a tensor")
    if loss.shape not in ((), (samples,)):
        raise UsageError(
            f"loss: the function returned shape {tuple(loss.shape)} for {samples} samples; "
            f"return a sum, of shape (), or one value for each sample, of shape ({samples},)"
        )
    if not loss.is_floating_point():
        raise UsageError(f"loss: the function returned values of {loss.dtype}; return floats")
    return loss.sum()


def _truth(targets: Tensor) -> tuple[Tensor, Tensor]:
    if targets.is_floating_point():
        return targets.argmax(dim=1), targets.sum(dim=1) > 0
    return targets, targets != SKIPPED


def _hits(outputs: Tensor, truth: Tensor, k: int) -> Tensor:
    """Return whether guess j of each sample is right: bool of shape [n, min(k, classes)]."""
    guesses = outputs.topk(min(k, outputs.shape[1]), dim=1).indices
    return guesses == truth[:, None]
