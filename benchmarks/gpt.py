"""GPT-2 in little: the model of Radford et al. 2019, "Language models are unsupervised multitask learners".

Pre-norm blocks, learned positions, GELU, and the embedding as the last layer. The vocabulary is padded to a multiple of
64, as nanoGPT does. Compact, so that nothing has to be installed or downloaded to measure it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.batch import Batch, Inputs
from lockstep.tasks.base import LOSS, Figures, Monitor


@dataclass(frozen=True)
class Shape:
    """How large a GPT is."""

    layers: int
    heads: int
    width: int
    block: int
    vocabulary: int


GPT2_124M: Final = Shape(layers=12, heads=12, width=768, block=1024, vocabulary=50304)
TINY: Final = Shape(layers=2, heads=2, width=64, block=64, vocabulary=256)


class Block(nn.Module):
    """Causal attention and an MLP, each added to what it is given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attend, self.join = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.widen, self.narrow = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, block, width] to the same."""
        samples, block, width = x.shape
        cut = self.attend(self.norm1(x)).view(samples, block, 3, self.heads, width // self.heads)
        query, key, value = cut.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).reshape(samples, block, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Maps tokens [samples, block] to logits [samples, block, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.block, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(
                    weight, std=0.02 / (2 * shape.layers) ** (0.5 * name.endswith(("join.weight", "narrow.weight")))
                )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


@final
@dataclass(frozen=True)
class NextToken:
    """The task of lockstep.tasks.base.Task: cross entropy of each next token, the mean over a sample's places."""

    counts_samples: bool = True
    unit: str = "samples"
    fractions: tuple[str, ...] = ()
    monitor: Monitor = LOSS

    def inputs(self, batch: Batch) -> Inputs:
        """Return the tokens."""
        return (batch[0],)

    def weight(self, batch: Batch) -> int:
        """Return the number of samples."""
        return len(batch[0])

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss added over samples."""
        targets = batch[1]
        summed = F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return summed / targets.shape[1]

    def sums(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return nothing: it is not evaluated."""
        return {}

    def figures(self, sums: Mapping[str, Tensor]) -> Figures:
        """Return nothing."""
        return {}
