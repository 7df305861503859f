"""Where torch has two ways through a layer, every strategy takes the same, in training and in evaluation."""

import pytest
import torch
import toys
from same_bits import Placed, assert_same_bits
from torch import Tensor, nn
from toys import Case

pytestmark = pytest.mark.slow("several ranks")

TOKENS, WIDTH = 12, 16
# With how many blocks of which one is recomputed.
PLACED: list[tuple[Placed, int]] = [
    *((("ddp", 2, ()), 0), (("zero2", 2, ()), 0), (("zero3", 2, ()), 0)),
    *((("single", 1, ()), 1), (("zero3", 2, ()), 1)),
]


class Sequences(nn.Module):
    """Images as sequences of tokens, blocks that a subclass calls, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.through(images.reshape(len(images), TOKENS, WIDTH)))

    def through(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Padded(Sequences):
    """torch's encoder, which in evaluation fuses and takes padding out, but not in modules with hooks."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
        super().__init__(nn.TransformerEncoder(layer, 2))

    def through(self, x: Tensor) -> Tensor:
        padding = torch.arange(TOKENS).expand(len(x), TOKENS) >= TOKENS - 3
        return self.blocks[0](x, src_key_padding_mask=padding)[:, 0]


class Attention(Sequences):
    """torch's attention, which multiplies at once where query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__(*(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2)))

    def through(self, x: Tensor) -> Tensor:
        for attention in self.blocks:
            x = x + attention(x, x, value=x, need_weights=False)[0]
        return x.mean(1)


class Cells(Sequences):
    """Cells that are called again and again in a forward."""

    def __init__(self) -> None:
        super().__init__(nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH))

    def through(self, x: Tensor) -> Tensor:
        lstm, gru = self.blocks
        state = gated = None
        for token in x[:, :4].unbind(1):
            state = lstm(token, state)
            gated = gru(token, gated)
        return state[0] + gated


class InPlace(Sequences):
    """Blocks that return views, which their caller changes."""

    def __init__(self) -> None:
        super().__init__(*(View() for _ in range(3)))

    def through(self, x: Tensor) -> Tensor:
        for view in self.blocks:
            y = view(x)
            y += 1.0
            x = x.sin() * y
        return x.mean(1)


class View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[..., WIDTH:]


class Layers(Sequences):
    """A recurrent layer, convolutions in one and normalized weights: what torch computes in other ways elsewhere."""

    def __init__(self) -> None:
        super().__init__(
            nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2),
            nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
            nn.Bilinear(WIDTH, WIDTH, WIDTH),
        )

    def through(self, x: Tensor) -> Tensor:
        x, _ = self.blocks[0](x)
        x = self.blocks[1](x).relu()
        return self.blocks[2](x[:, 0], x[:, 1])


@pytest.mark.worlds
@pytest.mark.parametrize("model", [Padded, Attention, Cells, InPlace, Layers])
def test_every_strategy_takes_the_same_path(model: type[nn.Module]) -> None:
    case = Case(4, samples=(12, 9), side=8, model=model, optimizer="adamw")
    for placed, recompute in PLACED:
        assert_same_bits(case, placed, recompute=recompute)
