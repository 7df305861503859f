"""Builds a model for fine-tuning: loads initial weights, adds adapters, and freezes parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from lockstep.errors import UsageError
from lockstep.models.adapters import Lora, add_adapters
from lockstep.models.freezing import freeze, freeze_batchnorm
from lockstep.models.reference import add_reference
from lockstep.tasks.base import Build


class InitialWeights(Protocol):
    """The interface of weights that are loaded into a new model before training."""

    @property
    def adapted(self) -> bool:
        """Whether the weights are from a model with adapters."""

    def load_into(self, model: nn.Module) -> object:
        """Copy the weights into `model`."""


@dataclass(frozen=True)
class Tuning:
    """The changes to apply to a model for fine-tuning.

    - `lora`: The adapters to add, if any.
    - `freeze_patterns`: Name patterns of the parameters to freeze.
    - `freezes_batchnorm`: Whether to freeze the running statistics of all BatchNorm layers.
    - `uses_reference`: Whether to add a frozen reference model, with which the task compares the model.
    """

    lora: Lora | None = None
    frozen: Sequence[str] = ()
    frozen_batchnorm: bool = False
    reference: bool = False


def build_finetuned(build: Build, tuning: Tuning, first_weights: InitialWeights | None = None) -> nn.Module:
    """Build a model, load `first_weights` if set, and apply `tuning`.

    Adding adapters renames the parameters of their layers. Therefore, weights from a model with adapters are loaded
    after adding the adapters, and all other weights are loaded before.
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
    if tuning.reference:
        if adapted:
            raise UsageError(
                "recipe.task: dpo cannot start from weights with adapters, because its reference would be the model "
                "without the adapters; merge them with `lockstep export --to safetensors`, and start from that file"
            )
        add_reference(model, adapters_only=tuning.lora is not None and not tuning.lora.train)
    return model
