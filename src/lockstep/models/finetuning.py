"""A model as a recipe tunes it: with other first weights, adapters, and parameters that are not trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from lockstep.models.adapters import Lora, adapt
from lockstep.models.freezing import freeze, freeze_batchnorm
from lockstep.tasks.base import Build


class FirstWeights(Protocol):
    """Weights that a model begins with instead of its own."""

    @property
    def adapted(self) -> bool:
        """Whether they are those of a model with adapters."""

    def into(self, model: nn.Module) -> object:
        """Copy them into a model."""


@dataclass(frozen=True)
class Tuning:
    """What is done to a model once it is built: adapters are put in, and what fits a pattern of `frozen` is frozen.

    With `frozen_batchnorm` the running statistics of all BatchNorm layers are, too.
    """

    lora: Lora | None = None
    frozen: Sequence[str] = ()
    frozen_batchnorm: bool = False


def build_finetuned(build: Build, tuning: Tuning, first: FirstWeights | None = None) -> nn.Module:
    """Build a model, give it other first weights where there are some, and tune it.

    Weights of a model with adapters are for one that has them; others come before, since adapters rename what they
    are put beside.
    """
    model = build()
    adapted = tuning.lora is not None and first is not None and first.adapted
    if first is not None and not adapted:
        first.into(model)
    if tuning.lora is not None:
        adapt(model, tuning.lora)
    if first is not None and adapted:
        first.into(model)
    if tuning.frozen:
        freeze(model, tuning.frozen)
    if tuning.frozen_batchnorm:
        freeze_batchnorm(model)
    return model
