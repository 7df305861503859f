"""Chunked logits, and a cross entropy that never gathers the logits.

Shoeybi et al. 2019, "Megatron-LM", section 3. For each row, each chunk of logits computes three numbers: the largest
logit, the sum of the exponentials, and the logit of the target if the chunk contains the target. All ranks gather these
numbers, and add the sums in the order of the reduction tree. The gradient of a chunk is its part of the softmax, minus
one at the target.

A head (vocab.py) returns a tensor subclass, because code between a model and its loss expects a tensor. The subclass
has the shape of the full logits, but only contains this rank's chunks. Operations that need the chunks of other ranks
raise an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lockstep.comm.canonical import add_
from lockstep.core.tree import LeafBlock, sum_pieces
from lockstep.errors import UsageError
from lockstep.parallel.tensor.chunks import Region


@final
class ChunkedLogits(Tensor):
    """Logits of shape [..., entries]. Only contains `chunks`, this rank's chunks of shape [..., entries per chunk]."""

    chunks: tuple[Tensor, ...]
    region: Region

    @staticmethod
    def __new__(
        cls, chunks: Sequence[Tensor], region: Region, entries: int, dtype: torch.dtype | None = None
    ) -> ChunkedLogits:
        """Create logits from this rank's chunks. The apparent `dtype` defaults to that of the chunks."""
        first = chunks[0]
        logits: ChunkedLogits = Tensor._make_wrapper_subclass(
            cls, (*first.shape[:-1], entries), dtype=dtype or first.dtype, device=first.device
        )
        logits.chunks, logits.region = tuple(chunks), region
        return logits

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply supported functions chunk by chunk. All other functions can only use the shape of the logits."""
        if function is F.cross_entropy:
            return _cross_entropy(inspect.signature(function).bind(*args, **(kwargs or {})).arguments)
        if chunkwise := _CHUNKWISE_FUNCTIONS.get(function):
            return chunkwise(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Raise UsageError, because the operation would read values of other ranks' chunks."""
        logits = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ChunkedLogits))
        _raise_unsupported(logits, f"{function} computes with them")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the shape and the indices of this rank's chunks. The other chunks' values aren't available."""
        return f"Logits of shape {[*self.shape]}, chunks {self.region.local_chunks} of {self.region.num_chunks}"


def _raise_unsupported(logits: ChunkedLogits, reason: str) -> NoReturn:
    raise UsageError(
        f"recipe.model.plan: {logits.region.name} is set to vocab, so its logits are in chunks during training, but "
        f"{reason}; use these logits only in a cross entropy, or set {logits.region.name} to whole"
    )


def _replace_chunks(logits: ChunkedLogits, chunks: Sequence[Tensor]) -> ChunkedLogits:
    return ChunkedLogits(chunks, logits.region, logits.shape[-1], logits.dtype)


def _index_logits(logits: ChunkedLogits, index: Any) -> ChunkedLogits:
    items = index if isinstance(index, tuple) else (index,)
    is_supported = all(item is Ellipsis or isinstance(item, slice) for item in items)
    if not is_supported or (items[-1] != slice(None) and (Ellipsis in items or len(items) == logits.ndim)):
        _raise_unsupported(logits, f"they are indexed by [{index}]")
    return _replace_chunks(logits, [part[index] for part in logits.chunks])


def _reshape(logits: ChunkedLogits, *shape: Any) -> ChunkedLogits:
    return _reshape_chunks(logits, torch.empty(logits.shape, device="meta").reshape(*shape))


def _flatten(logits: ChunkedLogits, start_dim: int = 0, end_dim: int = -1) -> ChunkedLogits:
    return _reshape_chunks(logits, torch.empty(logits.shape, device="meta").flatten(start_dim, end_dim))


def _reshape_chunks(logits: ChunkedLogits, like: Tensor) -> ChunkedLogits:
    if not like.ndim or like.shape[-1] != logits.shape[-1]:
        _raise_unsupported(logits, f"they are reshaped from {[*logits.shape]} to {[*like.shape]}")
    return _replace_chunks(logits, [part.reshape(*like.shape[:-1], part.shape[-1]) for part in logits.chunks])


def _to(logits: ChunkedLogits, *args: Any, dtype: torch.dtype | None = None) -> ChunkedLogits:
    dtype = next((argument for argument in args if isinstance(argument, torch.dtype)), dtype)
    if any(argument not in (dtype, logits.device) for argument in args):
        _raise_unsupported(logits, f"to({', '.join(map(str, args))}) is called on them")
    return ChunkedLogits(logits.chunks, logits.region, logits.shape[-1], dtype or logits.dtype)


def _register_hook(logits: ChunkedLogits, hook: Any) -> Any:
    """Register `hook` on each chunk. Required by fully_shard, which registers hooks on module outputs."""
    return [part.register_hook(hook) for part in logits.chunks][-1]  # type: ignore[no-untyped-call]


_CHUNKWISE_FUNCTIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    Tensor.__getitem__: _index_logits,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.contiguous: lambda logits: logits,
    Tensor.float: lambda logits: _to(logits, torch.float32),
    Tensor.to: _to,
    Tensor.requires_grad.__get__: lambda logits: any(part.requires_grad for part in logits.chunks),  # type: ignore[attr-defined]
    Tensor.register_hook: _register_hook,
}


def _cross_entropy(arguments: Mapping[str, Any]) -> Tensor:
    """Compute F.cross_entropy. `arguments` maps the argument names of a call to values.

    All sums are in float32 or wider.
    """
    logits, targets = arguments["input"], arguments["target"]
    for name, value in arguments.items():
        default = inspect.signature(F.cross_entropy).parameters[name].default
        if name not in ("input", "target", "ignore_index", "reduction") and value is not default and value != default:
            _raise_unsupported(logits, f"the cross entropy sets {name}")
    if logits.ndim != 2 or targets.ndim != 1 or targets.is_floating_point():
        _raise_unsupported(
            logits, f"logits of {[*logits.shape]} have targets of {targets.dtype} and shape {[*targets.shape]}"
        )
    ignored = arguments.get("ignore_index", -100)
    losses: Tensor = _CrossEntropy.apply(logits.region, logits.shape[-1], ignored, targets, *logits.chunks)
    match arguments.get("reduction", "mean"):
        case "none":
            return losses
        case "sum":
            return losses.sum()
        case _:
            mean: Tensor = losses.sum() / (targets != ignored).sum()
            return mean


class _CrossEntropy(torch.autograd.Function):
    """Computes the cross entropy [n] of `targets` [n] from this rank's chunks [n, e] of logits.

    The loss for targets with the value `ignored` is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, region: Region, num_entries: int, ignore_index: int, targets: Tensor, *logit_chunks: Tensor
    ) -> Tensor:
        valid = ((targets >= 0) & (targets < num_entries)) | (targets == ignore_index)
        torch._assert_async(valid.all(), f"a target is not in [0, {num_entries})")
        ctx.rows, ctx.ignored = region.get_row_ranges(num_entries), ignore_index
        statistics = [
            _compute_statistics(part, *_locate_targets(rows, targets))
            for rows, part in zip(ctx.rows, logit_chunks, strict=True)
        ]
        # Shapes are [chunks, n]. From here on, all ranks compute the same values.
        chunk_max, exp_sums, target_logits = region.all_gather(torch.stack(statistics)).unbind(1)
        row_max = chunk_max.amax(0)
        exp_sums = exp_sums * (chunk_max - row_max).exp()
        exp_total = sum_pieces(
            {LeafBlock(chunk, 1): chunk_sum for chunk, chunk_sum in enumerate(exp_sums)}, region.num_chunks, add_
        )
        ctx.save_for_backward(targets, row_max, exp_total, *logit_chunks)
        losses: Tensor = exp_total.log() - (target_logits.amax(0) - row_max)
        return losses.masked_fill(targets == ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        targets, row_max, exp_total, *parts = ctx.saved_tensors
        gradient = gradient.masked_fill(targets == ctx.ignored, 0)
        share = (gradient / exp_total)[:, None]
        gradients = []
        for rows, part in zip(ctx.rows, parts, strict=True):
            inside, positions = _locate_targets(rows, targets)
            softmax = (part.to(row_max.dtype) - row_max[:, None]).exp_().mul_(share)
            corrected = softmax.gather(1, positions[:, None]) - gradient.where(inside, 0)[:, None]
            gradients.append(softmax.scatter_(1, positions[:, None], corrected).to(part.dtype))
        return None, None, None, None, *gradients


def _locate_targets(rows: range, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of the targets in the chunk with `rows`, and their positions in the chunk (0 if outside)."""
    inside = (targets >= rows.start) & (targets < rows.stop)
    return inside, (targets - rows.start).where(inside, 0)


def _compute_statistics(chunk: Tensor, target_mask: Tensor, positions: Tensor) -> Tensor:
    """Return [3, n]: for each row, the largest logit m of a chunk, the sum of exp(logit - m), and the target logit."""
    logits = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
    row_max = logits.amax(1).clamp_min(torch.finfo(logits.dtype).min)  # finite even if all logits are minus infinity
    exp_sum = (logits - row_max[:, None]).exp_().sum(1)
    target_logits = logits.gather(1, positions[:, None]).squeeze(1).masked_fill(~target_mask, -torch.inf)
    return torch.stack([row_max, exp_sum, target_logits])
