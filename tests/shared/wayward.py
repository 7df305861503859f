"""Models that call other blocks in each micro-batch: as the samples decide, or chance."""

import torch
import toys
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Residual(nn.Module):
    """A block that reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Branches(_Body):
    """Residual blocks that read one activation, which a third reader and the head read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        return last(first(x) + second(x) * third(x)) + 0.3 * x


class Repeated(_Body):
    """A residual block that is called twice, on one activation and on what follows from it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        first, second, third = self.blocks
        y = first(x)
        return third(second(y) + first(y) + first(x))


class EncoderDecoder(_Body):
    """nn.Transformer, both halves of which read one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Transformer(WIDTH, 2, 2, 2, 8, dropout=0.1, batch_first=True)

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        tokens = torch.stack([x, x * 0.5, x.tanh()], 1)
        return self.blocks(tokens, tokens).mean(1)


class PassedThrough(_Body):
    """Blocks that return their input as it is, which others read; or a view of it."""

    class Block(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x[0, 0] > 0 else x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        x = x.view(-1, WIDTH)
        for block in self.blocks:
            x = block(x) + 0.1 * x * block(x)
        return x


class AuxiliaryHead(_Body):
    """Deep supervision: a head reads an activation that residual blocks read, too; a part of one leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.auxiliary = nn.Sequential(Residual(), nn.Linear(WIDTH, toys.CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).relu().mean((2, 3))
        first, second, third, last = self.blocks
        x = second(first(x))
        last(x)
        return self.head(third(x)) + 0.4 * self.auxiliary(x)


class Detached(_Body):
    """Residual blocks whose weights are read without a gradient besides."""

    class Block(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.linear.weight.detach()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        return last(first(x) + second(third(x)))


class FrozenBase(_Body):
    """Residual blocks of which most is frozen, as with adapters."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.adapter(self.base(x).tanh()) + self.base(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        return last(first(x) + second(third(x)))


class Teacher(_Body):
    """A pass without a gradient comes before the one that is trained, as pseudo-labels do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        with torch.no_grad():
            label = self.blocks[1](self.blocks[0](x))
        return self.blocks[1](self.blocks[0](x)) + label


class SkippedOrRepeated(_Body):
    """Each block is called not at all, once or twice, at random."""

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(int(torch.randint(3, ())) if self.training else 1):
                x = block(x)
        return x


class NotReentrant(_Body):
    """Two blocks at a time under torch's checkpoint, and a block of its own."""

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        x = checkpoint(lambda x: second(first(x)) + x, x, use_reentrant=False)
        return checkpoint(last, third(x) + x, use_reentrant=False)


class Transposed(_Body):
    """A weight that is a view of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.blocks[1].linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class ChannelsLast(_Body):
    """Weights of another memory format than the images."""

    def __init__(self) -> None:
        super().__init__(1)
        self.stem.to(memory_format=torch.channels_last)

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        return self.blocks[0](x)


class Writes(_Body):
    """Blocks whose forward clamps a weight in place."""

    class Block(Residual):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.3, 0.3)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class PenaltyFirst(_Body):
    """Weights of a block are used before the block is called, once they are whole in zero2."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.calls = 0

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            x = x * (1 + self.blocks[2].linear.weight.pow(2).sum())
        for block in self.blocks:
            x = block(x)
        return x


class Reentrant(_Body):
    """Blocks under torch's reentrant checkpoint in training."""

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.training else block(x)
        return x


class PassesOn(_Body):
    """Blocks that return one of their inputs as it is beside their output, as T5 does with its position bias."""

    class Block(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.bias = nn.Parameter(torch.ones(WIDTH)) if first else None

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            if bias is None:
                bias = self.bias * 2
            return x + self.linear(x).tanh() * bias, bias

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(number == 0) for number in range(3))

    def through(self, x: Tensor, images: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x
