"""GPT, a decoder-only transformer. Each block has causal self-attention and a feed-forward network, with pre-norm.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), with two additional options: rotary
positions (Su et al. 2021, arXiv 2104.09864, section 3.2) and no biases.

Tensor names end with their shape: n is the number of sequences, t is the number of tokens, d is the model width, h is
the number of heads, k is the number of channels per head (d / h), and v is the vocabulary size.
"""

from collections.abc import Iterable
from typing import Final, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError

_INIT_STD: Final = 0.02  # standard deviation of the initial weights
_ROTARY_BASE: Final = 10_000.0  # base of the rotary frequencies

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
    """Return a GPT that maps token IDs, int64 of shape [n, t] with t <= context, to logits of shape [n, t, vocabulary].

    If `tied` is True, the token embedding and the head share their weights. `bias` enables biases in LayerNorm and in
    the linear layers of the blocks. The head never has a bias. Raises UsageError if `heads`, `width` or `positions` is
    invalid.
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
    _initialize(model, layers)
    if tied:
        model.head.weight = model.embedding.tokens.weight
    return model


@torch.no_grad()
def _initialize(model: "GPT", layers: int) -> None:
    """Initialize weights as in GPT-2. In deeper models, the last layer of each residual branch has smaller weights."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            ends_branch = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=_INIT_STD / (2 * layers) ** 0.5 if ends_branch else _INIT_STD)


@final
class GPT(nn.Module):
    """The model that `gpt` builds.

    Only a single tensor is passed from module to module, so pipeline parallelism can split the model before any block.
    """

    def __init__(self, embedding: "Embedding", blocks: "Iterable[Block]", bias: bool) -> None:
        super().__init__()
        vocabulary, width = embedding.tokens.weight.shape
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids_nt: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the logits. `position_ids` has shape [1, t] or [n, t], and defaults to 0, 1, ..., t - 1."""
        positions = () if position_ids is None else (position_ids,)
        x_ntd = self.embedding(ids_nt, *positions)
        for block in self.blocks:
            x_ntd = block(x_ntd, *positions)
        logits_ntv: Tensor = self.head(self.norm(x_ntd))
        return logits_ntv


@final
class Embedding(nn.Module):
    """Token embeddings, to which position embeddings are added if positions are learned."""

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
    """A transformer block: causal self-attention, followed by a feed-forward network for each token."""

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
    """Multi-head causal self-attention.

    If `rotary_context` isn't 0, queries and keys have rotary position encodings for a context of this size.
    """

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, rotary_context: int) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.rotary = RotaryEmbedding(width // heads, rotary_context) if rotary_context else None

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
class RotaryEmbedding(nn.Module):
    """Rotary position encodings.

    Pairs of channels are rotated by an angle that is proportional to the position, so that the position only affects
    the product of a query and a key through their distance. Later channels rotate more slowly. Each attention layer has
    its own tables of sines and cosines, so that pipeline parallelism can split the model between any two blocks.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, channels: int, context: int) -> None:
        super().__init__()
        frequencies = _ROTARY_BASE ** -(torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x_nhtk: Tensor, position_ids: Tensor | None = None) -> Tensor:
        # The tables have shape [t, k / 2], or [n, 1, t, k / 2] with position ids.
        rows = slice(x_nhtk.shape[-2]) if position_ids is None else position_ids.unsqueeze(1)
        # Compute in float32. In 16 bits, many large positions would have the same angle.
        cosines, sines = self.cosines[rows].float(), self.sines[rows].float()
        left, right = x_nhtk.float().chunk(2, dim=-1)
        rotated = torch.cat([left * cosines - right * sines, left * sines + right * cosines], dim=-1)
        return rotated.type_as(x_nhtk)
