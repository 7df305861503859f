"""The canonical sum of gradients, exchanged in buckets while the last backward still runs.

A micro-batch's gradient is taken out of `param.grad` when its backward is done and pushed into one binary counter for
each bucket (core/tree.py). The last micro-batch of this rank is special: as soon as backward has filled a bucket, its
pieces are flattened and handed to the stream, which adds them over the ranks (comm/canonical.py). Buckets go out in
one order on all ranks: that of backward, from the last parameter to the first.

A parameter that a micro-batch does not use counts as a gradient of zeros, on one process and on many alike.

A nested backward, such as that of a reentrant checkpoint, may add to a gradient that looked complete. So after the
first one, buckets leave when the whole backward is over. The first backward of a run is waited for in any case.

Shapes: a bucket is b_N, flat: the elements of its parameters p_... one after the other, each in its order in memory and
followed by zeros, so that the next one begins where memory of its own might.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import Sum
from lockstep.comm.stream import CommStream
from lockstep.common.own_code import refusal
from lockstep.core.tree import Counter, LeafBlock, total
from lockstep.parallel.optimizer_state import Named
from lockstep.tasks.base import MicroBatch, MicroBatches, Note

Parts = list[Tensor]

# Each parameter takes a multiple of so many elements: 256 bytes at least. On CUDA kernels that add or multiply are
# chosen by where a tensor begins, and an optimizer is to find there what it finds on one process.
_ALIGNED: Final = 128


@dataclass(eq=False)
class _Bucket:
    parameters: list[nn.Parameter]
    add: Sum
    counter: Counter[Parts] = field(default_factory=lambda: Counter(add_parts_))
    missing: int = 0  # parameters whose gradient backward has not yet made
    sent: bool = False  # in this step


@final
class Gradients:
    """Adds the gradients of `parameters` over micro-batches and ranks."""

    def __init__(
        self,
        trained: Sequence[Named],
        canonical: Sum,
        stream: CommStream,
        alone: bool,
        bucket_bytes: int,
        sum_of: Callable[[Sequence[nn.Parameter]], Sum] | None = None,
    ) -> None:
        """Add by `canonical`, or each bucket by what `sum_of` makes for its parameters."""
        self._names = {parameter: name for name, parameter in trained}
        self._parameters = [parameter for _, parameter in trained]
        self._stream = stream
        self._alone = alone
        self._buckets = [
            _Bucket(bucket, canonical if sum_of is None else sum_of(bucket))
            for bucket in partition(self._parameters, None if alone else bucket_bytes)
        ]
        self._waiting: list[Callable[[], Tensor]] = []
        self._leaves = 0
        self._last_leaf: int | None = None
        self._armed = False
        self._graph_task = -1  # autograd's number of the first backward that made a gradient of this micro-batch
        self._nested = False  # whether a micro-batch had a second one, within the first or around it
        self._watched = False  # whether a micro-batch's backward has shown that
        self._note: Note | None = None
        for bucket in () if alone else self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket))  # type: ignore[no-untyped-call]

    def begin(self, leaves: int, microbatches: MicroBatches) -> None:
        """See GradientSum."""
        self._leaves = leaves
        # Where the last is a dummy, the sums are sent after it: in one order on all ranks, with what else is sent.
        self._last_leaf = microbatches[-1].index if microbatches and not microbatches[-1].dummy else None

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._armed = microbatch.index == self._last_leaf and not (self._alone or microbatch.dummy)
        self._graph_task = -1
        self._note = microbatch.note
        if microbatch.dummy:  # it is beside the step, whose sums may be there: what it makes must not be added to them
            for parameter in self._parameters:
                parameter.grad = None
        if self._armed:
            for bucket in self._buckets:
                bucket.missing = len(bucket.parameters)
                bucket.sent = False

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._watched = True
        if self._armed:
            self._armed = False
            return
        if self._nothing_to_add and not microbatch.dummy:
            if self._note is not None:
                self._show(self._parameters, [wide_gradient(parameter) for parameter in self._parameters])
            return
        for bucket in self._buckets:
            parts = self._take(bucket)
            if not microbatch.dummy:
                bucket.counter.push(microbatch.index, parts)

    def finish(self) -> None:
        """See GradientSum."""
        if self._nothing_to_add:
            for parameter in self._parameters:
                # One of fp32 is as it is added, whatever the parameter is in, which takes as long again to find out.
                if parameter.grad is None or parameter.grad.dtype is not torch.float32:
                    parameter.grad = wide_gradient(parameter)
            return
        if self._alone:
            for bucket in self._buckets:
                parts = total(bucket.counter.pieces(), self._leaves, add_parts_)
                give_gradients(bucket.parameters, parts)
            return
        self._send_ready(everything=True)
        for bucket, wait in zip(self._buckets, self._waiting, strict=True):
            give_gradients(bucket.parameters, unflatten(wait(), bucket.parameters))
        self._waiting.clear()

    @property
    def _nothing_to_add(self) -> bool:
        """Whether backward leaves the sum itself: of one micro-batch on one rank."""
        return self._alone and self._leaves == 1

    def _ready(self, bucket: _Bucket, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self._graph_task == -1:
            self._graph_task = task
        self._nested = self._nested or self._graph_task != task
        if not self._armed:
            return
        if bucket.sent:
            raise refusal(
                f"a backward within the backward, as torch.utils.checkpoint runs with use_reentrant=True, adds to the "
                f"gradient of {self._names[cast(nn.Parameter, parameter)]} after that was sent to the other ranks",
                "pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
            )
        bucket.missing -= 1
        if bucket.missing == 0 and self._watched and not self._nested:
            self._send_ready(everything=False)

    def _send_ready(self, everything: bool) -> None:
        for bucket in self._buckets[len(self._waiting) :]:
            if bucket.missing and not everything:
                return
            if self._last_leaf is not None:
                bucket.counter.push(self._last_leaf, self._take(bucket))
            bucket.sent = True
            self._waiting.append(self._stream.submit(partial(self._sum, bucket, bucket.counter.pieces())))

    def _take(self, bucket: _Bucket) -> Parts:
        parts = [_take_gradient(parameter) for parameter in bucket.parameters]
        self._show(bucket.parameters, parts)
        return parts

    def _show(self, parameters: Sequence[nn.Parameter], gradients: Parts) -> None:
        if self._note is not None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._note(f"gradient of {self._names[parameter]}", gradient)

    def _sum(self, bucket: _Bucket, pieces: Mapping[LeafBlock, Parts]) -> Tensor:
        flat = {block: flatten(parts, bucket.parameters) for block, parts in pieces.items()}
        return bucket.add(flat, self._leaves, empty_sum(bucket.parameters))


def partition(parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[list[nn.Parameter]]:
    """Group parameters, last first as backward reaches them, into buckets of one dtype and about `bucket_bytes`."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        fits = bucket_bytes is None or size <= room
        if not buckets or not fits or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            room = bucket_bytes or 0
        buckets[-1].append(parameter)
        room -= size
    return buckets


def _take_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = wide_gradient(parameter)
    parameter.grad = None
    return gradient


def wide_gradient(parameter: nn.Parameter) -> Tensor:
    """Return what a backward left in `grad`, in the dtype that it is added in; zeros where it left nothing."""
    dtype, gradient = sum_dtype(parameter), parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return gradient if gradient.dtype is dtype else gradient.to(dtype)  # `to` takes longer to find that it is


def nodes_behind(root: Any) -> Iterator[Any]:
    """Yield a node of an autograd graph and each that its gradient goes on to."""
    waiting, met = [root], {root}
    while waiting:
        yield (node := waiting.pop())
        for following, _ in node.next_functions:
            if following is not None and following not in met:
                met.add(following)
                waiting.append(following)


def sum_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype that gradients of a parameter are added in: its own, or fp32 where it is a copy (weights.py)."""
    return torch.float32 if parameter.grad_dtype is None else parameter.dtype


def give_gradients(parameters: Sequence[nn.Parameter], gradients: Parts) -> None:
    """Leave gradients in `grad`."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def empty_sum(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a flat vector for the sum of the gradients of parameters of one dtype."""
    return parameters[0].new_empty(sum(_sizes(parameters)), dtype=sum_dtype(parameters[0]))


def add_parts_(left: Parts, right: Parts) -> Parts:
    """Add the gradients `right` to `left`, in place."""
    torch._foreach_add_(left, right)
    return left


def _sizes(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the length of each parameter and of the zeros behind it, one after the other."""
    return [size for each in parameters for size in (each.numel(), -each.numel() % _ALIGNED)]


def _memory_order(parameter: Tensor) -> list[int]:
    """Dims from the outermost in memory to the innermost: flattening in this order moves memory as it lies."""
    return sorted(range(parameter.ndim), key=parameter.stride, reverse=True)


def flatten(parts: Parts, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a flat vector of the gradients of parameters, each in the order in which its parameter is in memory."""
    flat = [part.permute(_memory_order(each)).reshape(-1) for part, each in zip(parts, parameters, strict=True)]
    zeros = flat[0].new_zeros(_ALIGNED)
    gaps = [zeros[:size] for size in _sizes(parameters)[1::2]]
    return torch.cat([each for pair in zip(flat, gaps, strict=True) for each in pair])


def unflatten(flat: Tensor, parameters: Sequence[nn.Parameter]) -> Parts:
    """Return views of a bucket's flat vector in the shapes of its parameters."""
    pieces = torch.split(flat, _sizes(parameters))[::2]
    return [_as_lies(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def _as_lies(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    order = _memory_order(parameter)
    back = [order.index(dim) for dim in range(parameter.ndim)]
    return piece.view([parameter.shape[dim] for dim in order]).permute(back)
