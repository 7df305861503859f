"""First weights follow from the seed, whatever was drawn before."""

import random

import numpy as np
import torch
from torch import nn

from lockstep.models.initialization import initialize_model


def _from_every_generator() -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([random.random(), np.random.rand()]))
    return model


def _flat(seed: int) -> torch.Tensor:
    return nn.utils.parameters_to_vector(initialize_model(_from_every_generator, seed).parameters())


def test_same_seed_same_weights() -> None:
    first = _flat(3)
    torch.rand(5), np.random.rand(), random.random()
    assert torch.equal(_flat(3), first)


def test_each_generator_follows_the_seed() -> None:
    assert (_flat(3) != _flat(4)).all()


def test_golden() -> None:
    """A change of this number changes what every recipe's run starts from."""
    model = initialize_model(lambda: nn.Linear(1, 1, bias=False), 0)
    torch.testing.assert_close(next(model.parameters()).item(), 0.262555480, rtol=0, atol=1e-8)
