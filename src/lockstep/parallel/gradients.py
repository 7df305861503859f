"""Canonical gradient sums. Gradients are reduced bucket by bucket, overlapping with the last backward pass.

A step has these phases:

1. After the backward pass of each micro-batch except the last, the gradients are moved from `param.grad` to the binary
   counters of their buckets (core/tree.py).
2. During the backward pass of this rank's last micro-batch, a hook on each parameter counts the gradients that are
   ready. Once a bucket and all earlier buckets are complete, its partial sums are submitted to the stream, which
   flattens them and sums them over the ranks (comm/canonical.py). All ranks submit the buckets in the same order: the
   order of the backward pass, from the last parameter to the first.
3. `finish` submits the remaining buckets, waits for the sums, and stores them in `param.grad`.

If a micro-batch doesn't use a parameter, the gradient of the parameter is zero, on any number of ranks.

A nested backward pass, such as in a reentrant checkpoint, can add to a gradient that looked complete. Therefore, if a
micro-batch has ever had a nested backward pass, buckets are only submitted after the outer backward pass. The first
backward pass of a run is handled in the same way, because it isn't known yet whether the model runs nested backward
passes.

Shapes: a bucket is a flat vector b_N with the elements of its parameters p_..., one parameter after the other. The
elements of a parameter are in memory order and padded with zeros, so that each parameter has the same alignment as if
it were allocated separately.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import VectorSum
from lockstep.comm.stream import CommStream
from lockstep.common.user_code import make_refusal
from lockstep.core.tree import BinaryCounter, LeafBlock, sum_pieces
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.tasks.base import MicroBatch, MicroBatches, TensorRecorder

GradientList = list[Tensor]

# Pad each parameter to a multiple of this number of elements, i.e. of at least 256 bytes. CUDA selects kernels by
# alignment, and the optimizer must run the same kernels as in a single process.
_ALIGNED: Final = 128


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are summed together with `sum_over_ranks`."""

    parameters: list[nn.Parameter]
    sum_over_ranks: VectorSum
    counter: BinaryCounter[GradientList] = field(default_factory=lambda: BinaryCounter(add_gradients_))
    num_missing: int = 0  # number of parameters whose gradients aren't ready
    submitted: bool = False  # whether the bucket was submitted to the stream in this step


@final
class BucketedGradientSum:
    """Sums the gradients of the trained parameters over micro-batches and ranks."""

    def __init__(
        self,
        trained: Sequence[NamedParameter],
        canonical_sum: VectorSum,
        stream: CommStream,
        single_process: bool,
        bucket_bytes: int,
        make_sum: Callable[[Sequence[nn.Parameter]], VectorSum] | None = None,
    ) -> None:
        """Sum each bucket with `canonical_sum`, or with `make_sum(parameters)` if `make_sum` is set.

        Set `single_process` if there is nothing to sum over ranks.
        """
        self._names = {parameter: name for name, parameter in trained}
        self._parameters = [parameter for _, parameter in trained]
        self._stream = stream
        self._single_process = single_process
        self._buckets = [
            _Bucket(bucket, canonical_sum if make_sum is None else make_sum(bucket))
            for bucket in partition_into_buckets(self._parameters, None if single_process else bucket_bytes)
        ]
        self._waiting: list[Callable[[], Tensor]] = []
        self._leaves = 0
        self._last_leaf: int | None = None
        self._overlapping = False
        self._graph_task = -1  # ID of the first backward pass that reached a parameter in this micro-batch
        self._nested = False  # whether any micro-batch so far has had a nested backward pass
        self._nesting_known = False  # whether a backward pass has finished, so that `_nested` is valid
        self._note: TensorRecorder | None = None
        for bucket in () if single_process else self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient_ready, bucket))  # type: ignore[no-untyped-call]

    def begin(self, num_microbatches: int, microbatches: MicroBatches) -> None:
        """See GradientSum."""
        self._leaves = num_microbatches
        # If this rank's last micro-batch is a dummy, submit the sums after its backward pass, so that all ranks issue
        # their collectives in the same order.
        self._last_leaf = microbatches[-1].index if microbatches and not microbatches[-1].is_dummy else None

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._overlapping = microbatch.index == self._last_leaf and not (self._single_process or microbatch.is_dummy)
        self._graph_task = -1
        self._note = microbatch.record_tensor
        if microbatch.is_dummy:  # `grad` may contain the sums of the step, which a dummy must not add to
            for parameter in self._parameters:
                parameter.grad = None
        if self._overlapping:
            for bucket in self._buckets:
                bucket.num_missing = len(bucket.parameters)
                bucket.submitted = False

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._nesting_known = True
        if self._overlapping:
            self._overlapping = False
            return
        if self._is_already_summed and not microbatch.is_dummy:
            if self._note is not None:
                self._record_gradients(
                    self._parameters, [get_wide_gradient(parameter) for parameter in self._parameters]
                )
            return
        for bucket in self._buckets:
            parts = self._take_gradients(bucket)
            if not microbatch.is_dummy:
                bucket.counter.push(microbatch.index, parts)

    def finish(self) -> None:
        """See GradientSum."""
        if self._is_already_summed:
            for parameter in self._parameters:
                # Skip fp32 gradients, which never need conversion: this check is cheaper than `get_wide_gradient`.
                if parameter.grad is None or parameter.grad.dtype is not torch.float32:
                    parameter.grad = get_wide_gradient(parameter)
            return
        if self._single_process:
            for bucket in self._buckets:
                parts = sum_pieces(bucket.counter.pop_pieces(), self._leaves, add_gradients_)
                set_gradients(bucket.parameters, parts)
            return
        self._submit_ready(submit_all=True)
        for bucket, wait in zip(self._buckets, self._waiting, strict=True):
            set_gradients(bucket.parameters, unflatten_gradients(wait(), bucket.parameters))
        self._waiting.clear()

    @property
    def _is_already_summed(self) -> bool:
        """Whether there is only one micro-batch and one rank, so that there is nothing to sum."""
        return self._single_process and self._leaves == 1

    def _on_gradient_ready(self, bucket: _Bucket, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self._graph_task == -1:
            self._graph_task = task
        self._nested = self._nested or self._graph_task != task
        if not self._overlapping:
            return
        if bucket.submitted:
            raise make_refusal(
                f"a nested backward pass (such as torch.utils.checkpoint with use_reentrant=True) added to the "
                f"gradient of {self._names[cast(nn.Parameter, parameter)]} after it was sent to other ranks",
                "pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
            )
        bucket.num_missing -= 1
        if bucket.num_missing == 0 and self._nesting_known and not self._nested:
            self._submit_ready(submit_all=False)

    def _submit_ready(self, submit_all: bool) -> None:
        for bucket in self._buckets[len(self._waiting) :]:
            if bucket.num_missing and not submit_all:
                return
            if self._last_leaf is not None:
                bucket.counter.push(self._last_leaf, self._take_gradients(bucket))
            bucket.submitted = True
            self._waiting.append(self._stream.submit(partial(self._sum_bucket, bucket, bucket.counter.pop_pieces())))

    def _take_gradients(self, bucket: _Bucket) -> GradientList:
        parts = [_take_gradient(parameter) for parameter in bucket.parameters]
        self._record_gradients(bucket.parameters, parts)
        return parts

    def _record_gradients(self, parameters: Sequence[nn.Parameter], gradients: GradientList) -> None:
        if self._note is not None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._note(f"gradient of {self._names[parameter]}", gradient)

    def _sum_bucket(self, bucket: _Bucket, pieces: Mapping[LeafBlock, GradientList]) -> Tensor:
        flat = {block: flatten_gradients(parts, bucket.parameters) for block, parts in pieces.items()}
        return bucket.sum_over_ranks(flat, self._leaves, allocate_sum(bucket.parameters))


def partition_into_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[list[nn.Parameter]]:
    """Group parameters into buckets of one dtype and at most `bucket_bytes`, from the last parameter to the first.

    A larger parameter has its own bucket. If `bucket_bytes` is None, the size is unlimited.
    """
    buckets: list[list[nn.Parameter]] = []
    remaining_bytes = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        fits = bucket_bytes is None or size <= remaining_bytes
        if not buckets or not fits or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            remaining_bytes = bucket_bytes or 0
        buckets[-1].append(parameter)
        remaining_bytes -= size
    return buckets


def _take_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = get_wide_gradient(parameter)
    parameter.grad = None
    return gradient


def get_wide_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient in the dtype of the gradient sum, or zeros if it has no gradient."""
    dtype, gradient = get_sum_dtype(parameter), parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return gradient if gradient.dtype is dtype else gradient.to(dtype)  # faster than `to` if the dtype is the same


def iterate_backward_nodes(root: Any, boundary: Collection[Any] = ()) -> Iterator[Any]:
    """Yield the autograd node `root` and all nodes that are reachable from it in the backward graph.

    Nodes in `boundary`, and nodes that are only reachable through them, aren't yielded.
    """
    pending, visited = [] if root in boundary else [root], {root, *boundary}
    while pending:
        yield (node := pending.pop())
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                pending.append(following)


def get_sum_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's gradient sum: the parameter's dtype, or fp32 for weight copies (weights.py)."""
    return torch.float32 if parameter.grad_dtype is None else parameter.dtype


def set_gradients(parameters: Sequence[nn.Parameter], gradients: GradientList) -> None:
    """Set the `grad` of each parameter."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def allocate_sum(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Allocate a flat, uninitialized vector for the gradient sums of parameters with the same dtype."""
    return parameters[0].new_empty(sum(_compute_section_sizes(parameters)), dtype=get_sum_dtype(parameters[0]))


def add_gradients_(left: GradientList, right: GradientList) -> GradientList:
    """Add the gradients `right` to `left` in place, and return `left`."""
    torch._foreach_add_(left, right)
    return left


def _compute_section_sizes(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the number of elements in each section of a flat vector: each parameter, followed by its padding."""
    return [size for parameter in parameters for size in (parameter.numel(), -parameter.numel() % _ALIGNED)]


def _get_memory_order(parameter: Tensor) -> list[int]:
    """Return the dims of a tensor by stride, largest first. Flattening in this order doesn't copy dense tensors."""
    return sorted(range(parameter.ndim), key=parameter.stride, reverse=True)


def flatten_gradients(gradients: GradientList, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Concatenate gradients into a flat vector with padding, each gradient in the memory order of its parameter."""
    flat = [
        part.permute(_get_memory_order(parameter)).reshape(-1)
        for part, parameter in zip(gradients, parameters, strict=True)
    ]
    zeros = flat[0].new_zeros(_ALIGNED)
    gaps = [zeros[:size] for size in _compute_section_sizes(parameters)[1::2]]
    return torch.cat([piece for pair in zip(flat, gaps, strict=True) for piece in pair])


def unflatten_gradients(flat: Tensor, parameters: Sequence[nn.Parameter]) -> GradientList:
    """Return views of a bucket's flat vector with the shapes of its parameters.

    This is the inverse of `flatten_gradients`.
    """
    pieces = torch.split(flat, _compute_section_sizes(parameters))[::2]
    return [_view_like(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def _view_like(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    order = _get_memory_order(parameter)
    inverse = [order.index(dim) for dim in range(parameter.ndim)]
    return piece.view([parameter.shape[dim] for dim in order]).permute(inverse)
