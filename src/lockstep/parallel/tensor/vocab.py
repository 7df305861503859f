"""Tables whose rows are split into chunks: embeddings, and heads that compute logits.

Shoeybi et al. 2019, "Megatron-LM", section 3. The number of rows doesn't have to be a multiple of the number of chunks.
Only the forward methods of modules are replaced. Modules keep their names and weights, and two modules can share a
weight.

- Embedding: each chunk returns the rows that it contains, and zeros for all other rows. The reduction tree sums the
  chunks.
- Head: each chunk returns the logits of its rows. In training, the logits stay in chunks (logits.py). In evaluation,
  all ranks gather the full logits. The gradient of the inputs is summed over the chunks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lockstep.core.order import cut
from lockstep.parallel.linear_map import linear_map
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.layers import by_chunk, column_outputs
from lockstep.parallel.tensor.logits import Logits


@final
class LookUp:
    """Replaces the forward method of an embedding whose weight only contains this rank's rows."""

    def __init__(self, module: nn.Embedding, chunks: Region) -> None:
        self.module = module
        self.chunks = chunks
        self.rows = module.num_embeddings  # number of rows of the full table

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the row of each id: [..., d]."""
        module = self.module
        embeddings: Tensor = _LookUp.apply(self.chunks, self.rows, module.padding_idx, ids.reshape(-1), module.weight)
        return embeddings.view(*ids.shape, -1)


@final
class Head:
    """Replaces the forward method of a linear layer whose weight and bias only contain this rank's rows."""

    def __init__(self, module: nn.Linear, chunks: Region) -> None:
        self.module = module
        self.chunks = chunks
        self.rows = module.out_features  # number of rows of the full weight

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the logits: chunked in training, and full in evaluation."""
        module = self.module
        flat = column_outputs(self.chunks, module.bias, module.weight, inputs.reshape(-1, inputs.shape[-1]))
        parts = [logits.view(*inputs.shape[:-1], -1) for logits in flat]
        if module.training:
            return Logits(parts, self.chunks, self.rows)
        [whole] = linear_map(
            partial(_join_chunks, self.chunks, self.rows), partial(_own_part, self.chunks, self.rows), parts
        )
        return whole


class _LookUp(torch.autograd.Function):
    """Looks up the rows [n, d] for `ids` [n]. The row of the id `padding` receives no gradient."""

    @staticmethod
    def forward(ctx: Any, chunks: Region, length: int, padding: int | None, ids: Tensor, weight: Tensor) -> Tensor:
        torch._assert_async(((ids >= 0) & (ids < length)).all(), f"an id is not in [0, {length})")
        ctx.rows, ctx.padding = chunks.rows(length), padding
        ctx.save_for_backward(ids)
        # Adding zeros changes no bits, except that -0.0 becomes 0.0.
        return chunks.total(_chunk_embeddings(ctx.rows, by_chunk(weight, chunks), ids))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        [ids] = ctx.saved_tensors
        gradients = []
        for rows in ctx.rows:
            inside = (ids >= rows.start) & (ids < rows.stop)
            if ctx.padding is not None:
                inside &= ids != ctx.padding
            ids_here, gradient_rows = ids[inside] - rows.start, gradient[inside]
            gradients.append(torch.ops.aten.embedding_dense_backward(gradient_rows, ids_here, len(rows), -1, False))
        return None, None, None, None, torch.cat(gradients)


def _chunk_embeddings(chunks: list[range], weights: tuple[Tensor, ...], ids: Tensor) -> Iterator[Tensor]:
    for rows, weight in zip(chunks, weights, strict=True):
        outside = (ids < rows.start) | (ids >= rows.stop)
        yield F.embedding((ids - rows.start).masked_fill(outside, 0), weight).masked_fill_(outside[:, None], 0)


def _join_chunks(chunks: Region, length: int, parts: Sequence[Tensor]) -> list[Tensor]:
    """Gather and concatenate the chunks of all ranks: [..., entries]."""
    if len(parts) == chunks.count:
        return [torch.cat([*parts], -1)]
    lengths = [len(rows) for rows in cut(length, chunks.count)]
    # The first chunk is the longest.
    padded = [F.pad(chunk, (0, lengths[0] - chunk.shape[-1])) for chunk in parts]
    all_chunks = chunks.gather_all(torch.stack(padded))
    return [torch.cat([chunk[..., :count] for chunk, count in zip(all_chunks, lengths, strict=True)], -1)]


def _own_part(chunks: Region, length: int, gradients: Sequence[Tensor]) -> list[Tensor]:
    [gradient] = gradients
    return [gradient[..., rows.start : rows.stop] for rows in chunks.rows(length)]
