"""A small model with regions of every kind, whose sizes divide by little else than the chunks."""

import torch
import toys
from torch import Tensor, nn
from torch.nn import functional as F

PLAN = (
    ("*.attention", "heads:heads"),
    ("*.attention.queries_keys_values", "colwise:3"),
    ("*.attention.norm", "shared"),
    ("*.attention.out", "rowwise"),
    ("blocks.?", "region:feed_forward"),
    ("*.gate", "colwise"),
    ("*.up", "colwise"),
    ("*.down", "rowwise"),
    ("tail.first", "colwise"),
    ("tail.last", "rowwise"),
    ("tail.before", "whole"),
    ("tail.after", "whole"),
)


class Attention(nn.Module):
    """Four heads of three features, normed each, with dropout of what they look at."""

    dropout = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.queries_keys_values = nn.Linear(11, 3 * 12)
        self.norm = nn.LayerNorm(3)
        self.out = nn.Linear(12, 11)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        n, t, _ = x.shape
        split = self.queries_keys_values(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = split.unbind(0)
        weights = (scale * self.norm(queries) @ self.norm(keys).transpose(-2, -1)).softmax(-1)
        looked = F.dropout(weights, self.dropout, self.training) @ values
        attended: Tensor = self.out(looked.transpose(1, 2).reshape(n, t, -1))
        return F.dropout(attended, self.dropout, self.training)  # after the last layer, as if nothing were cut


class Block(nn.Module):
    """Attention, a module; then a gated net without biases, in a method."""

    dropout = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(11)
        self.gate = nn.Linear(11, 20, bias=False)
        self.up = nn.Linear(11, 20, bias=False)
        self.down = nn.Linear(20, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, scale=0.5)
        return x + self.feed_forward(self.norm(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(F.dropout(F.silu(self.gate(x)), self.dropout, self.training) * self.up(x))
        return fed


class Tail(nn.Module):
    """A region with a layer before its first cut one and one after its last."""

    dropout = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(11)
        self.first = nn.Linear(11, 8)
        self.last = nn.Linear(8, 11)
        self.after = nn.LayerNorm(11)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.before(x), self.dropout, self.training)
        after: Tensor = self.after(self.last(F.gelu(self.first(x))))
        return after


class Net(nn.Module):
    """Pixels are tokens; BatchNorm is outside of what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 11, 3)
        self.norm = nn.BatchNorm2d(11)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.tail = Tail()
        self.head = nn.Linear(11, toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        head: Tensor = self.head(self.tail(x).mean(1))
        return head


class Still(Net):
    """Without dropout, which draws other numbers for chunks than for the whole."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, Attention | Block | Tail):
                module.dropout = 0.0


def made() -> Net:
    """Return the model, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()
