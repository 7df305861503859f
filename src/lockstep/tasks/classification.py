"""Classification: cross entropy or the user's loss as a sum, and how often the truth is among k guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.importing import import_object
from lockstep.own_code import OwnCode
from lockstep.tasks.base import SKIPPED

Loss = Callable[[Tensor, Tensor], Tensor]

_TOLERANCE: Final = 1e-2  # of the sum of a mixture, which may have been rounded to bfloat16
_SHOWN: Final = 6  # values of a target


@final
@dataclass(frozen=True)
class Classification:
    """A task whose outputs have shape [n, classes].

    Targets are int64 of shape [n], with SKIPPED for a sample that counts as nothing, or the weights of a
    mixture of classes: floats of shape [n, classes], where a row of zeros counts as nothing. `loss` None is
    cross entropy.
    """

    build: Callable[[], nn.Module]
    loss: Loss | None = None
    label_smoothing: float = 0.0
    topk: tuple[int, ...] = (1, 5)
    name: str = "model"
    sample: Tensor | None = None

    def __post_init__(self) -> None:
        if self.loss is not None and self.label_smoothing:
            raise UsageError(
                f"loss: label_smoothing is {self.label_smoothing}, but the loss is a function of yours; "
                f"smooth in that function and leave label_smoothing out, or use cross_entropy"
            )

    def build_model(self) -> nn.Module:
        """Build the model."""
        return self.build()

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss added over the samples: a 0-dim tensor.

        A user's loss that returns one value for each sample is added up here; a scalar is taken as their sum.
        """
        if self.loss is None:
            with OwnCode(f"{self.name}: the cross entropy of its outputs"):
                return cross_entropy_sum(outputs, targets, self.label_smoothing)
        loss = _summed(self.loss(outputs, targets), len(targets))
        if outputs.requires_grad and not loss.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                "loss: it carries no gradient; compute it from the outputs by torch's functions alone, without detach()"
            )
        return loss

    @property
    def count_names(self) -> tuple[str, ...]:
        """Return the names of the counts."""
        return (*(f"correct{k}" for k in self.topk), "counted")

    def counts(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return `counted`, the samples with a target, and `correct<k>` for each k: 0-dim int64 tensors.

        With a mixture of classes the heaviest one is the truth.
        """
        truth, counted = _truth(targets)
        hits = _hits(outputs, truth, max(self.topk, default=1)) & counted[:, None]
        correct = {f"correct{k}": hits[:, :k].sum() for k in self.topk}
        return {**correct, "counted": counted.sum()}


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
