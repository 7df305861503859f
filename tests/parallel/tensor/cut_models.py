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
    ("*.experts", "experts:count"),
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


class Experts(nn.Module):
    """Eight experts, rows of its parameters, with dropout inside."""

    dropout = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.count = 8
        self.up = nn.Parameter(torch.randn(8, 5, 11) / 3)
        self.up_bias = nn.Parameter(torch.randn(8, 5) / 3)
        self.down = nn.Parameter(torch.randn(8, 11, 5) / 3)
        self.register_parameter("down_bias", None)

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        given = torch.zeros_like(tokens)
        for expert in range(self.count):
            places, slots = (numbers == expert).nonzero(as_tuple=True)
            fed = F.linear(tokens[places], self.up[expert], self.up_bias[expert]).relu()
            fed = F.linear(F.dropout(fed, self.dropout, self.training), self.down[expert])
            given = given.index_add(0, places, fed * weights[places, slots, None])
        return given


class Mixture(nn.Module):
    """For each token the two best of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(11, 8, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, numbers = self.router(rows).float().softmax(-1).topk(2)
        return self.experts(rows, numbers, weights.to(x.dtype)).view_as(x)


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
        return self.down(F.dropout(F.silu(self.gate(x)), self.dropout, self.training) * self.up(x))


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
        return self.after(self.last(F.gelu(self.first(x))))


class Net(nn.Module):
    """Pixels are tokens; BatchNorm is outside of what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 11, 3)
        self.norm = nn.BatchNorm2d(11)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mixture = Mixture()
        self.tail = Tail()
        self.head = nn.Linear(11, toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = x + self.mixture(x)
        return self.head(self.tail(x).mean(1))


class Still(Net):
    """Without dropout, which draws other numbers for chunks than for the whole."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, Attention | Block | Tail | Experts):
                module.dropout = 0.0


def made() -> Net:
    """Return the model, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()
