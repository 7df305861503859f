"""A model is looked at without memory, and on the CPU only where it must be."""

import warnings

import torch
from torch import nn

from lockstep.device.meta import build_on_meta


class Reads(nn.Linear):
    """Looks at its weights while it is built."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = self.weight.abs().max().item()


def _loud() -> nn.Module:
    warnings.warn("of the build", stacklevel=1)
    return nn.Linear(1 << 20, 1 << 20)


def devices(model: nn.Module) -> set[torch.device]:
    return {each.device for each in [*model.parameters(), *model.buffers()]}


def test_a_model_of_terabytes_needs_no_memory_and_warns_nobody() -> None:
    assert devices(build_on_meta(_loud)) == {torch.device("meta")}


def test_a_model_that_reads_its_values_is_built_on_the_cpu() -> None:
    assert devices(build_on_meta(Reads)) == {torch.device("cpu")}
