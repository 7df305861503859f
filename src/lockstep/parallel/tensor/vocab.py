"""Layers whose rows are split into chunks: embeddings, and heads that return logits.

Shoeybi et al. 2019, "Megatron-LM", section 3. The number of rows doesn't have to be a multiple of the number of chunks.
Only the forward method of a module is replaced. The module keeps its name and weight, so weights can still be tied.

- Embedding: each chunk returns the embeddings of the ids that it contains, and zeros for all other ids. The reduction
  tree adds the results of all chunks.
- Head: each chunk returns the logits of its rows. In training, the logits stay in chunks (logits.py). In evaluation,
  the full logits are gathered on all ranks. The gradient of the inputs is summed over the chunks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lockstep.core.order import split_range
from lockstep.parallel.linear_map import apply_linear_map
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.layers import compute_columns, split_by_chunk
from lockstep.parallel.tensor.logits import ChunkedLogits


@final
class ChunkedLookup:
    """Replaces the forward method of an embedding whose weight only contains this rank's rows."""

    def __init__(self, module: nn.Embedding, region: Region) -> None:
        self.module = module
        self.region = region
        self.num_rows = module.num_embeddings  # number of rows of the full table

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., d] of `ids` [...]."""
        module = self.module
        embeddings: Tensor = _LookupFunction.apply(
            self.region, self.num_rows, module.padding_idx, ids.reshape(-1), module.weight
        )
        return embeddings.view(*ids.shape, -1)


@final
class ChunkedHead:
    """Replaces the forward method of a linear layer whose weight and bias only contain this rank's rows."""

    def __init__(self, module: nn.Linear, region: Region) -> None:
        self.module = module
        self.region = region
        self.num_rows = module.out_features  # number of rows of the full weight

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the logits: in training, this rank's chunks (ChunkedLogits), and in evaluation, the full logits."""
        module = self.module
        flat = compute_columns(self.region, module.bias, module.weight, inputs.reshape(-1, inputs.shape[-1]))
        parts = [logits.view(*inputs.shape[:-1], -1) for logits in flat]
        if module.training:
            return ChunkedLogits(parts, self.region, self.num_rows)
        [full] = apply_linear_map(
            partial(_join_chunks, self.region, self.num_rows),
            partial(_slice_gradient, self.region, self.num_rows),
            parts,
        )
        return full


class _LookupFunction(torch.autograd.Function):
    """Looks up the embeddings [n, d] of `ids` [n]. The embedding of the ID `padding_index` gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, region: Region, num_entries: int, padding_index: int | None, ids: Tensor, weight: Tensor
    ) -> Tensor:
        torch._assert_async(((ids >= 0) & (ids < num_entries)).all(), f"an id is not in [0, {num_entries})")
        ctx.rows, ctx.padding = region.get_row_ranges(num_entries), padding_index
        ctx.save_for_backward(ids)
        # Adding zeros changes no bits, except that -0.0 becomes 0.0.
        return region.sum_chunks(_look_up_chunks(ctx.rows, split_by_chunk(weight, region), ids))

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


def _look_up_chunks(row_ranges: list[range], weights: tuple[Tensor, ...], ids: Tensor) -> Iterator[Tensor]:
    for rows, weight in zip(row_ranges, weights, strict=True):
        outside = (ids < rows.start) | (ids >= rows.stop)
        yield F.embedding((ids - rows.start).masked_fill(outside, 0), weight).masked_fill_(outside[:, None], 0)


def _join_chunks(region: Region, num_entries: int, local_chunks: Sequence[Tensor]) -> list[Tensor]:
    """All-gather the chunks, and concatenate them: [..., entries]. `local_chunks` are this rank's chunks."""
    if len(local_chunks) == region.num_chunks:
        return [torch.cat([*local_chunks], -1)]
    lengths = [len(rows) for rows in split_range(num_entries, region.num_chunks)]
    # Pad all chunks to the length of the first chunk, which is the longest.
    padded = [F.pad(chunk, (0, lengths[0] - chunk.shape[-1])) for chunk in local_chunks]
    all_chunks = region.all_gather(torch.stack(padded))
    return [torch.cat([chunk[..., :count] for chunk, count in zip(all_chunks, lengths, strict=True)], -1)]


def _slice_gradient(region: Region, num_entries: int, gradients: Sequence[Tensor]) -> list[Tensor]:
    [gradient] = gradients
    return [gradient[..., rows.start : rows.stop] for rows in region.get_row_ranges(num_entries)]
