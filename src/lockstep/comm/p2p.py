"""Point-to-point messages between pipeline stages. Sends don't wait for the receiver to be ready.

A message is a list of tensors, integers and None. It is sent as a header, followed by its tensors. The header is a
vector of integers of fixed length that describes the values. Each tensor keeps its memory layout, because some kernels
select their algorithm by strides, and must select the same one as in a single process. gloo transfers the headers and
all CPU tensors, such as generator states. The carriers of the world transfer the tensors on the device.

Messages between two ranks arrive in the order in which they were sent, because NCCL has no tags. Each message belongs
to a numbered channel. The receiving rank stores messages of other channels until they are received.

This module also wraps torch's functions for split backward passes.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from lockstep.comm.carrier import Transfer
from lockstep.comm.peer_errors import translate_peer_errors
from lockstep.comm.world import World
from lockstep.errors import TrainingError

_TAG: Final = 1  # tag of gloo's sends; carriers don't use tags
_HEADER_LENGTH: Final = 512
_NONE_CODE: Final = -1  # in place of a dtype index, stands for None
_INT_CODE: Final = -2
_DTYPES: Final = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)

Value = Tensor | int | None
Values = list[Value]


class _TensorSpec(NamedTuple):
    """The memory layout of a tensor, whether it requires a gradient, and whether it is on the CPU."""

    dtype: torch.dtype
    requires_grad: bool
    on_host: bool
    shape: list[int]
    strides: list[int]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def storage_length(self) -> int:
        """The number of elements that the tensor spans in memory. Less than `num_elements` for expanded tensors."""
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps) if self.num_elements else 0


@final
class PointToPoint:
    """Sends and receives messages: lists of tensors, integers and None.

    `neighbors` are the ranks that this rank exchanges messages with. All ranks must create this object at the same time
    (see comm/edges.py).
    """

    def __init__(self, world: World, neighbors: Collection[int]) -> None:
        self._device = world.device
        self._number = world.to_torch_rank
        self._edges = world.connect(neighbors)
        self._host_sends: list[tuple[dist.Work, Tensor]] = []
        self._sent: deque[Transfer] = deque()
        self._stored_messages: dict[tuple[int, int], deque[Values]] = {}  # by rank and channel

    def send(self, values: Sequence[Value], peer: int, channel: int) -> None:
        """Start sending a message to rank `peer`. Don't modify its tensors before you call `finish`."""
        numbers = [channel, len(values), *(number for value in values for number in _encode_spec(value))]
        if len(numbers) > _HEADER_LENGTH:
            raise TrainingError(
                f"strategy pipeline: {len(values)} values cross between two stages, which is too many for one message; "
                f"set cut to split the model elsewhere"
            )
        while self._sent and self._sent[0].is_done():
            self._sent.popleft()
        with translate_peer_errors():
            self._send_host_tensor(torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers))), peer)
            for value in values:
                if isinstance(value, Tensor) and value.numel():
                    self._start_send(_flatten(value.detach()).view(torch.uint8), peer)

    def receive(self, peer: int, channel: int) -> Values:
        """Wait for the next message from rank `peer` on this channel, and return its values.

        Tensors that require a gradient on the sending rank are returned as autograd leaves that require a gradient.
        """
        with translate_peer_errors():
            while not self._stored_messages.get((peer, channel)):
                arrived_channel, values = self._receive_next_message(peer)
                self._stored_messages.setdefault((peer, arrived_channel), deque()).append(values)
        return self._stored_messages[peer, channel].popleft()

    def finish(self) -> None:
        """Wait until all sent tensors can be modified."""
        with translate_peer_errors():
            for work, _ in self._host_sends:
                work.wait()
            for transfer in self._sent:
                transfer.wait()
        self._host_sends.clear()
        self._sent.clear()

    def _send_host_tensor(self, tensor: Tensor, peer: int) -> None:
        work = dist.isend(tensor, self._number(peer), tag=_TAG)
        assert work is not None
        self._host_sends.append((work, tensor))

    def _start_send(self, tensor: Tensor, peer: int) -> None:
        if tensor.device.type == self._device.type:
            edge = self._edges[peer]
            self._sent.append(edge.outbound([(tensor, edge.peer)], []))
        else:
            self._send_host_tensor(tensor, peer)

    def _receive_next_message(self, peer: int) -> tuple[int, Values]:
        """Receive the next message from `peer` on any channel. Returns its channel and its values."""
        numbers = torch.empty(_HEADER_LENGTH, dtype=torch.int64)
        dist.recv(numbers, self._number(peer), tag=_TAG)
        channel, *description = numbers.tolist()
        return channel, [
            self._receive_value(spec, peer) if isinstance(spec, _TensorSpec) else spec
            for spec in _parse_specs(description)
        ]

    def _receive_value(self, spec: _TensorSpec, peer: int) -> Tensor:
        device = torch.device("cpu") if spec.on_host else self._device
        flat = torch.empty(min(spec.num_elements, spec.storage_length), dtype=spec.dtype, device=device)
        if len(flat):
            self._receive_into(flat.view(torch.uint8), peer)
        if spec.storage_length > spec.num_elements:  # the memory layout has gaps, which aren't sent
            with_gaps = flat.new_empty(spec.storage_length)
            with_gaps.as_strided(spec.shape, spec.strides).copy_(flat.view(spec.shape))
            flat = with_gaps
        return flat.as_strided(spec.shape, spec.strides).requires_grad_(spec.requires_grad)

    def _receive_into(self, buffer: Tensor, peer: int) -> None:
        if buffer.device.type == self._device.type:
            edge = self._edges[peer]
            edge.inbound([], [(buffer, edge.peer)]).wait()
        else:
            dist.recv(buffer, self._number(peer), tag=_TAG)


def backward_input(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Parameter]
) -> list[dict[str, Any]]:
    """Run the part of a backward pass that computes the gradients of `inputs`.

    Returns the groups of graph nodes to pass to `backward_weight`. The gradients of `inputs` aren't returned, because
    autograd functions store them. Gradients of vectors, such as BatchNorm weights, are also computed. Deferring them
    would save no time, and a CUDA kernel that only computes such a gradient adds in a different order.
    """
    from torch.distributed.pipelining import _backward as torch_backward  # lazy import: takes half a second

    # Like torch's stage_backward_input, but starts from graph edges. Up to torch 2.14, torch's function requires the
    # outputs, which are already freed here.
    starts, ends = ([get_gradient_edge(tensor).node for tensor in tensors] for tensors in (inputs, weights))
    groups: list[dict[str, Any]] = torch_backward.get_param_groups(
        starts, ends, torch_backward.construct_reverse_graph([edge.node for edge in edges])
    )
    vectors = {get_gradient_edge(weight).node for weight in weights if weight.ndim < 2}
    immediate = [node for group in groups if group["params"] <= vectors for node in group["params"]]
    deferred = [group for group in groups if not group["params"] <= vectors]
    with ExitStack() as hooks:
        for group in deferred:
            nodes = group["intermediates"] = list(group["intermediates"])
            arrived_gradients = group["grads"] = [()] * len(nodes)
            for number, node in enumerate(nodes):
                hooks.enter_context(node.register_prehook(partial(arrived_gradients.__setitem__, number)))
        if edges and inputs:
            targets = [GradientEdge(node, 0) for node in (*starts, *immediate)]
            computed = torch.autograd.grad(edges, targets, gradients, retain_graph=True, allow_unused=True)
            deferred.append({"gradients": dict(zip(immediate, computed[len(starts) :], strict=True))})
    return deferred


def backward_weight(groups: list[dict[str, Any]], weights: Sequence[Parameter]) -> None:
    """Run the rest of a backward pass, and store the gradients of `weights` in their `grad`.

    Like torch's stage_backward_weight, which before torch 2.13 counts a gradient twice if it flows between two
    intermediate nodes.
    """
    owners = {get_gradient_edge(weight).node: weight for weight in weights}

    def add_gradient(node: Node, gradient: Tensor | None) -> None:
        weight = owners[node]
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    for group in groups:
        if "gradients" in group:
            for node, gradient in group["gradients"].items():
                add_gradient(node, gradient)
            continue
        node_gradients = list(zip(group.pop("intermediates"), group.pop("grads"), strict=True))
        slots = [(GradientEdge(node, slot), grad) for node, grads in node_gradients for slot, grad in enumerate(grads)]
        arrived_edges = [(edge, gradient) for edge, gradient in slots if gradient is not None]
        if not arrived_edges:
            continue
        ends = list(group["params"])  # a list, so that the order is fixed
        # The gradient that has arrived at a node already includes the gradients from other nodes of its group. Don't
        # add them again.
        with ExitStack() as hooks:
            for node, grads in node_gradients:
                hooks.enter_context(node.register_prehook(partial(_replace_gradients, grads)))
            # Retain the graph: if weights join the graph of the inputs in several places, parts of it run again. The
            # graph is freed together with `groups`.
            computed = torch.autograd.grad(
                [edge for edge, _ in arrived_edges],
                [GradientEdge(node, 0) for node in ends],
                [gradient for _, gradient in arrived_edges],
                retain_graph=True,
            )
        for node, gradient in zip(ends, computed, strict=True):
            add_gradient(node, gradient)


def _replace_gradients(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return gradients


def _encode_spec(value: Value) -> list[int]:
    if value is None:
        return [_NONE_CODE]
    if isinstance(value, int):
        return [_INT_CODE, value]
    description = [_DTYPES.index(value.dtype), int(value.requires_grad), int(value.device.type == "cpu"), value.ndim]
    return [*description, *value.shape, *value.stride()]


def _parse_specs(header: list[int]) -> Iterator[_TensorSpec | int | None]:
    """Parse the integers that `_encode_spec` returns."""
    remaining = iter(header)
    for _ in range(next(remaining)):
        code = next(remaining)
        if code < 0:
            yield None if code == _NONE_CODE else next(remaining)
            continue
        requires_grad, on_host, ndim = islice(remaining, 3)
        yield _TensorSpec(
            _DTYPES[code], bool(requires_grad), bool(on_host), [*islice(remaining, ndim)], [*islice(remaining, ndim)]
        )


def _flatten(value: Tensor) -> Tensor:
    spec = _TensorSpec(value.dtype, False, False, list(value.shape), list(value.stride()))
    if spec.storage_length > spec.num_elements:
        return value.contiguous().view(-1)
    return value.as_strided([spec.storage_length], [1], value.storage_offset())
