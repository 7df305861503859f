"""Builds a model for fine-tuning: loads initial weights, adds adapters, and freezes parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from lockstep.errors import UsageError
from lockstep.models.adapters import Lora, add_adapters
from lockstep.models.freezing import freeze, freeze_batchnorm
from lockstep.models.reference import add_reference
from lockstep.tasks.base import ModelFactory


class InitialWeights(Protocol):
    """The interface of weights that are loaded into a new model before training."""

    @property
    def has_adapters(self) -> bool:
        """Whether the weights are from a model with adapters."""

    def load_into(self, model: nn.Module) -> object:
        """Copy the weights into `model`."""


@dataclass(frozen=True)
class FinetuneSettings:
    """The changes to apply to a model for fine-tuning.

    - `lora`: The adapters to add, if any.
    - `freeze_patterns`: Name patterns of the parameters to freeze.
    - `freezes_batchnorm`: Whether to freeze the running statistics of all BatchNorm layers.
    - `uses_reference`: Whether to add a frozen reference model, with which the task compares the model.
    """

    lora: Lora | None = None
    freeze_patterns: Sequence[str] = ()
    freezes_batchnorm: bool = False
    uses_reference: bool = False


def build_finetuned(
    build: ModelFactory, tuning: FinetuneSettings, first_weights: InitialWeights | None = None
) -> nn.Module:
    """Build a model, load `first_weights` if set, and apply `tuning`.

    Adding adapters renames the parameters of their layers. Therefore, weights from a model with adapters are loaded
    after adding the adapters, and all other weights are loaded before.
    """
    model = build()
    weights_have_adapters = tuning.lora is not None and first_weights is not None and first_weights.has_adapters
    if first_weights is not None and not weights_have_adapters:
        first_weights.load_into(model)
    if tuning.lora is not None:
        add_adapters(model, tuning.lora)
    if first_weights is not None and weights_have_adapters:
        first_weights.load_into(model)
    if tuning.freeze_patterns:
        freeze(model, tuning.freeze_patterns)
    if tuning.freezes_batchnorm:
        freeze_batchnorm(model)
    if tuning.uses_reference:
        if weights_have_adapters:
            raise UsageError(
                "recipe.task: dpo cannot start from weights with adapters, because its reference would be the model "
                "without the adapters; merge them with `lockstep export --to safetensors`, and start from that file"
            )
        add_reference(model, adapters_only=tuning.lora is not None and not tuning.lora.train)
    return model
