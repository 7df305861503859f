"""Models that call other blocks in each micro-batch: as the samples decide, or chance."""

import torch
import toys
from torch import Tensor, nn

WIDTH = 6


class _Body(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.through(self.stem(images).relu().mean((2, 3)), images))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        raise NotImplementedError


class Block(nn.Module):
    """A block of which one parameter is used at times alone."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.into(x).tanh()
        return x * self.scale if x[0, 0] > 0 else x


class Experts(_Body):
    """A mixture of experts as it is written by hand: those that get no sample are not called."""

    def __init__(self) -> None:
        super().__init__(6)
        self.gate = nn.Linear(WIDTH, 6)

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.blocks):
            mask = chosen == number
            if mask.any():
                found[mask] = expert(x[mask]) * weights[mask, None]
        return found


class LayerDrop(_Body):
    """Fan et al. 2020: each block is left out at random."""

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.6:
                x = block(x)
        return x


class Routed(_Body):
    """Blocks in another order, or twice, as the first sample says; the last one hardly ever."""

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        x = third(first(x)) if images[0, 0, 0, 0] > 0 else first(third(x))
        x = second(second(x))
        return last(x) if images[0, 0, 0, 1] > 1 else x


class Frozen(LayerDrop):
    """Blocks of which some are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:3]:
            block.requires_grad_(False)


class Twice(_Body):
    """What must not be done: a block is called a second time in some micro-batches, after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.blocks[1](x) if self.calls > 3 and images[0, 0, 0, 0] > 0 else x
