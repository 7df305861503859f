"""A decoder-only transformer: blocks of causal self-attention and a feed-forward network, each after a LayerNorm.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), with two additional options: rotary
positions (Su et al. 2021, arXiv 2104.09864, section 3.2) and no biases.

Shapes, as suffixes of names: n sequences, t tokens, d width of the model, h heads, k channels of one head (d / h), v
size of the vocabulary.
"""

from collections.abc import Iterable
from typing import Final, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError

_SPREAD: Final = 0.02  # standard deviation of initial weights
_BASE: Final = 10_000.0  # of the wavelengths of rotary positions

Positions = Literal["learned", "rotary"]


def gpt(
    vocabulary: int = 256,
    context: int = 256,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
    positions: Positions = "learned",
    bias: bool = False,
    tied: bool = True,
) -> nn.Module:
    """Return a GPT that maps token ids, int64 of shape [n, t] with t <= context, to logits of shape [n, t, vocabulary].

    If `tied` is True, the token embedding and the head share their weights. `bias` enables biases in the linear layers
    of the blocks and in LayerNorm. The head never has a bias. Raises UsageError if the sizes don't fit.
    """
    if heads < 1 or width % heads:
        raise UsageError(f"model gpt: {heads} heads do not divide width={width}; use a number of heads that divides it")
    if positions not in ("learned", "rotary"):
        raise UsageError(f"model gpt: positions must be learned or rotary, got {positions!r}")
    if positions == "rotary" and width // heads % 2:
        raise UsageError(
            f"model gpt: rotary positions require an even number of channels per head, got {width // heads}; change "
            f"width or heads"
        )
    embedding = Embedding(vocabulary, context, width, dropout, learned_positions=positions == "learned")
    rotary_context = context if positions == "rotary" else 0
    model = GPT(embedding, [Block(width, heads, dropout, bias, rotary_context) for _ in range(layers)], bias)
    _initialise(model, layers)
    if tied:
        model.head.weight = model.embedding.tokens.weight
    return model


@torch.no_grad()
def _initialise(model: "GPT", layers: int) -> None:
    """Initialize weights as in GPT-2. The outputs of residual branches start smaller if there are more layers."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            ends_branch = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=_SPREAD / (2 * layers) ** 0.5 if ends_branch else _SPREAD)


@final
class GPT(nn.Module):
    """See `gpt`.

    A single tensor is passed from the embedding to the head, so a pipeline can be split before any block.
    """

    def __init__(self, embedding: "Embedding", blocks: "Iterable[Block]", bias: bool) -> None:
        super().__init__()
        vocabulary, width = embedding.tokens.weight.shape
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids_nt: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the logits. `position_ids`, of shape [1, t] or [n, t], default to 0, 1, ..., t - 1."""
        positions = () if position_ids is None else (position_ids,)
        x_ntd = self.embedding(ids_nt, *positions)
        for block in self.blocks:
            x_ntd = block(x_ntd, *positions)
        logits_ntv: Tensor = self.head(self.norm(x_ntd))
        return logits_ntv


@final
class Embedding(nn.Module):
    """An embedding of the tokens and, if positions are learned, of their positions."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float, learned_positions: bool) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width) if learned_positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids_nt: Tensor, position_ids: Tensor | None = None) -> Tensor:
        length = ids_nt.shape[1]
        if length > self.context:
            raise UsageError(
                f"model gpt: a sequence has {length} tokens, but context is {self.context}; use shorter sequences or a "
                f"larger context"
            )
        x_ntd = self.tokens(ids_nt)
        if self.positions is not None:
            positions = torch.arange(length, device=ids_nt.device) if position_ids is None else position_ids
            x_ntd = x_ntd + self.positions(positions)
        output: Tensor = self.dropout(x_ntd)
        return output


@final
class Block(nn.Module):
    """A layer of the model: attention over the tokens so far, followed by a feed-forward network on each token."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, rotary_context: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, dropout, bias, rotary_context)
        self.feed_forward_norm = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_ntd: Tensor, position_ids: Tensor | None = None) -> Tensor:
        positions = () if position_ids is None else (position_ids,)
        x_ntd = x_ntd + self.dropout(self.attention(self.attention_norm(x_ntd), *positions))
        output: Tensor = x_ntd + self.dropout(self.feed_forward(self.feed_forward_norm(x_ntd)))
        return output

    def feed_forward(self, x_ntd: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x_ntd)))
        return output


@final
class Attention(nn.Module):
    """Causal self-attention. If `turned`, the context size, is not 0, queries and keys get rotary positions."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, rotary_context: int) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.rotary = Rotary(width // heads, rotary_context) if rotary_context else None

    def forward(self, x_ntd: Tensor, position_ids: Tensor | None = None) -> Tensor:
        n, t, _ = x_ntd.shape
        projections = self.queries_keys_values(x_ntd).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q_nhtk, k_nhtk, v_nhtk = projections.unbind(0)
        if self.rotary is not None:
            q_nhtk, k_nhtk = self.rotary(q_nhtk, position_ids), self.rotary(k_nhtk, position_ids)
        dropout = self.dropout if self.training else 0.0
        y_nhtk = F.scaled_dot_product_attention(q_nhtk, k_nhtk, v_nhtk, dropout_p=dropout, is_causal=True)
        output: Tensor = self.out(y_nhtk.transpose(1, 2).reshape(n, t, -1))
        return output


@final
class Rotary(nn.Module):
    """Rotates pairs of channels by their position, slower for later channels, so that only the distance matters.

    Each attention layer has its own buffers for the tables. This means that a pipeline can be split between any two
    blocks.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, channels: int, context: int) -> None:
        super().__init__()
        speeds = _BASE ** -(torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(context), speeds)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x_nhtk: Tensor, position_ids: Tensor | None = None) -> Tensor:
        # [t, k / 2], or with a dim for the heads: [n, 1, t, k / 2].
        rows = slice(x_nhtk.shape[-2]) if position_ids is None else position_ids.unsqueeze(1)
        # Computed in float32, because 16-bit angles can't tell far positions apart.
        cosines, sines = self.cosines[rows].float(), self.sines[rows].float()
        left, right = x_nhtk.float().chunk(2, dim=-1)
        rotated = torch.cat([left * cosines - right * sines, left * sines + right * cosines], dim=-1)
        return rotated.type_as(x_nhtk)
