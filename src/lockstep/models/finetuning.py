"""Builds a model for fine-tuning: loads initial weights, adds adapters, and freezes parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from lockstep.models.adapters import Lora, add_adapters
from lockstep.models.freezing import freeze, freeze_batchnorm
from lockstep.tasks.base import Build


class InitialWeights(Protocol):
    """Initial weights to load into a new model."""

    @property
    def adapted(self) -> bool:
        """Whether the weights come from a model with adapters."""

    def load_into(self, model: nn.Module) -> object:
        """Copy the weights into a model."""


@dataclass(frozen=True)
class Tuning:
    """The changes to a model after it is built.

    - `lora`: The adapters to add, if any.
    - `frozen`: Patterns of parameters to freeze.
    - `frozen_batchnorm`: Whether to freeze the running statistics of all BatchNorm layers.
    """

    lora: Lora | None = None
    frozen: Sequence[str] = ()
    frozen_batchnorm: bool = False


def build_finetuned(build: Build, tuning: Tuning, first_weights: InitialWeights | None = None) -> nn.Module:
    """Build a model, load `first_weights` into the model if they are set, and apply `tuning`.

    Weights from a model with adapters are loaded after the adapters are added. All other weights are loaded before,
    because adding adapters renames the parameters of their layers.
    """
    model = build()
    adapted = tuning.lora is not None and first_weights is not None and first_weights.adapted
    if first_weights is not None and not adapted:
        first_weights.load_into(model)
    if tuning.lora is not None:
        add_adapters(model, tuning.lora)
    if first_weights is not None and adapted:
        first_weights.load_into(model)
    if tuning.frozen:
        freeze(model, tuning.frozen)
    if tuning.frozen_batchnorm:
        freeze_batchnorm(model)
    return model
