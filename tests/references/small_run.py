"""A small run that any framework can do: a network, its data, and the recipes that are compared.

Nothing of Lockstep is in here, so that the references share no arithmetic with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

PROCESSES: Final = 2  # and as many micro-batches
SAMPLES: Final = 8  # of a micro-batch
STEPS: Final = 5
CLASSES: Final = 5
MODEL_SEED: Final = 0


@dataclass(frozen=True)
class Recipe:
    """An optimizer of torch's, its learning rate, and the norm to which gradients are clipped."""

    optimizer: str
    lr: float
    max_norm: float | None = None

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer, in its multi-tensor form as Lockstep takes it."""
        return getattr(torch.optim, self.optimizer)(parameters, lr=self.lr, foreach=True, **self.options)

    @property
    def options(self) -> dict[str, float]:
        """Everything but the learning rate.

        Adam divides a gradient by its own magnitude plus eps. Where samples nearly cancel each other, a rounding error
        would be magnified to a whole learning rate; the large eps bounds that to 1 / eps = 1e4 times.
        """
        return {"momentum": 0.9} if self.optimizer == "SGD" else {"weight_decay": 0.01, "eps": 1e-4}


RECIPES: Final = {
    "sgd": Recipe("SGD", 0.1),
    "sgd-clipped": Recipe("SGD", 0.1, max_norm=0.5),  # their norms are near 1
    "adamw": Recipe("AdamW", 0.01),
}


def wrong(recipe: Recipe) -> Recipe:
    """Return a recipe that must not pass for `recipe`: its learning rate is one percent off."""
    return replace(recipe, lr=1.01 * recipe.lr)


def build() -> nn.Sequential:
    """Build the network, each time with the same weights: blocks in a row, without BatchNorm."""
    with torch.random.fork_rng():
        torch.manual_seed(MODEL_SEED)
        blocks = [
            nn.Sequential(nn.Conv2d(3, 9, 3), nn.GroupNorm(3, 9), nn.ReLU()),  # of 9 and 13 rows: nothing is even
            nn.Sequential(nn.Flatten(), nn.Linear(9 * 16, 13), nn.Tanh()),
            nn.Linear(13, CLASSES),
        ]
        return nn.Sequential(*blocks)


def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one micro-batch."""
    generator = torch.Generator().manual_seed(step * PROCESSES + microbatch)
    return (
        torch.randn(SAMPLES, 3, 6, 6, generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


# How far two correct runs may lie apart, as a part of a tensor's largest magnitude. Rounding: in fp32 u = 6e-8, the
# longest sums are of 9 * 16 = 144 products in forward and of 8 samples x 16 places = 128 in backward, whose likely
# error is about sqrt(144) u = 7e-7 of their terms' magnitude; three layers forward and back, and five steps that each
# start from what the last one left, add up some 30 of them: 2e-5. A learning rate that is one percent off moves weights
# by a hundredth of what they moved, 1e-3 and more.
TOLERANCE: Final = 2e-5


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of any two tensors, as a part of the largest magnitude in the second."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items())
