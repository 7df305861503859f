"""Tensors from one stage of a pipeline to another, without waiting for the other to be ready.

A parcel is a message of whole numbers, always of the same length, that describes the tensors, then the tensors
themselves, each in its memory layout: where a kernel chooses its way by strides, the receiver's choice is then that of
a single process. The message goes by gloo, and so does what is on the CPU, as states of generators do. Tensors of the
device go as the world's carriers take them.

What one rank sends another arrives in order, and is received in that order: NCCL knows no tags. Parcels are on lines;
one that comes before its line is asked for waits on the receiving rank.

torch's own functions for split backwards are imported here.
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

_TAG: Final = 1  # of what goes by gloo; what carriers send has none
_NUMBERS: Final = 512
_NOTHING: Final = -1  # where else the number of a dtype stands
_NUMBER: Final = -2
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


class _Form(NamedTuple):
    """A tensor's memory layout, whether it wants a gradient, and whether that memory is the host's."""

    dtype: torch.dtype
    wanted: bool
    on_host: bool
    shape: list[int]
    strides: list[int]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements of memory from its first to its last: fewer than its own where some are repeated."""
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps) if self.elements else 0


@final
class PointToPoint:
    """Sends and receives parcels: lists of tensors and whole numbers, with None for what is not there.

    Each rank makes one with the ranks that it sends to or receives from, its `neighbours`; see comm/edges.py.
    """

    def __init__(self, world: World, neighbours: Collection[int]) -> None:
        self._device = world.device
        self._number = world.number
        self._edges = world.edges(neighbours)
        self._messages: list[tuple[dist.Work, Tensor]] = []
        self._sent: deque[Transfer] = deque()
        self._early: dict[tuple[int, int], deque[Values]] = {}  # by rank and line

    def send(self, values: Sequence[Value], peer: int, line: int) -> None:
        """Start sending to rank `peer`. The tensors must not be written to before `finish`."""
        numbers = [line, len(values), *(number for value in values for number in _description(value))]
        if len(numbers) > _NUMBERS:
            raise TrainingError(f"pipeline: {len(values)} values cross between two stages, too many; cut elsewhere")
        while self._sent and self._sent[0].is_done():
            self._sent.popleft()
        with translate_peer_errors():
            self._message(torch.tensor(numbers + [0] * (_NUMBERS - len(numbers))), peer)
            for value in values:
                if isinstance(value, Tensor) and value.numel():
                    self._start(_flat(value.detach()).view(torch.uint8), peer)

    def receive(self, peer: int, line: int) -> Values:
        """Wait for the next parcel of rank `peer` on this line; what wanted a gradient there is a leaf that does."""
        with translate_peer_errors():
            while not self._early.get((peer, line)):
                found, values = self._next(peer)
                self._early.setdefault((peer, found), deque()).append(values)
        return self._early[peer, line].popleft()

    def finish(self) -> None:
        """Wait until all that was sent has arrived, as far as who goes on writing here must wait."""
        with translate_peer_errors():
            for work, _ in self._messages:
                work.wait()
            for transfer in self._sent:
                transfer.wait()
        self._messages.clear()
        self._sent.clear()

    def _message(self, tensor: Tensor, peer: int) -> None:
        work = dist.isend(tensor, self._number(peer), tag=_TAG)
        assert work is not None
        self._messages.append((work, tensor))

    def _start(self, data: Tensor, peer: int) -> None:
        if data.device.type == self._device.type:
            edge = self._edges[peer]
            self._sent.append(edge.there([(data, edge.peer)], []))
        else:
            self._message(data, peer)

    def _next(self, peer: int) -> tuple[int, Values]:
        """Return the parcel that `peer` sent after the last one, and its line."""
        numbers = torch.empty(_NUMBERS, dtype=torch.int64)
        dist.recv(numbers, self._number(peer), tag=_TAG)
        line, *rest = numbers.tolist()
        return line, [self._value(form, peer) if isinstance(form, _Form) else form for form in _forms(rest)]

    def _value(self, form: _Form, peer: int) -> Tensor:
        device = torch.device("cpu") if form.on_host else self._device
        flat = torch.empty(min(form.elements, form.extent), dtype=form.dtype, device=device)
        if len(flat):
            self._fill(flat.view(torch.uint8), peer)
        if form.extent > form.elements:  # with gaps, which did not travel
            gaps = flat.new_empty(form.extent)
            gaps.as_strided(form.shape, form.strides).copy_(flat.view(form.shape))
            flat = gaps
        return flat.as_strided(form.shape, form.strides).requires_grad_(form.wanted)

    def _fill(self, data: Tensor, peer: int) -> None:
        if data.device.type == self._device.type:
            edge = self._edges[peer]
            edge.back([], [(data, edge.peer)]).wait()
        else:
            dist.recv(data, self._number(peer), tag=_TAG)


def backward_input(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Parameter]
) -> list[dict[str, Any]]:
    """Do the part of a backward that leads to `inputs`, and return what `backward_weight` needs for the weights.

    The gradients of `inputs` are seen by hooks on the way, and kept nowhere. Those of vectors alone, as BatchNorm's
    weights are, are not put off: there is nothing to win, and on CUDA a kernel that is asked for them without the
    gradient of its input adds in another order.
    """
    from torch.distributed.pipelining import _backward as torch_backward  # here, because it takes half a second

    # As torch's stage_backward_input, but from edges: up to torch 2.14 it wants the outputs themselves, which are gone.
    starts, ends = ([get_gradient_edge(each).node for each in tensors] for tensors in (inputs, weights))
    groups: list[dict[str, Any]] = torch_backward.get_param_groups(
        starts, ends, torch_backward.construct_reverse_graph([edge.node for edge in edges])
    )
    vectors = {get_gradient_edge(each).node for each in weights if each.ndim < 2}
    at_once = [node for group in groups if group["params"] <= vectors for node in group["params"]]
    put_off = [group for group in groups if not group["params"] <= vectors]
    with ExitStack() as hooks:
        for group in put_off:
            nodes = group["intermediates"] = list(group["intermediates"])
            arrived = group["grads"] = [()] * len(nodes)
            for number, node in enumerate(nodes):
                hooks.enter_context(node.register_prehook(partial(arrived.__setitem__, number)))
        if edges and inputs:
            wanted = [GradientEdge(node, 0) for node in (*starts, *at_once)]
            found = torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True)
            put_off.append({"made": dict(zip(at_once, found[len(starts) :], strict=True))})
    return put_off


def backward_weight(groups: list[dict[str, Any]], weights: Sequence[Parameter]) -> None:
    """Do the rest of a backward: leave the gradients of `weights` in their `grad`.

    As torch's stage_backward_weight, which before torch 2.13 counts twice what one intermediate node hands to another.
    """
    owners = {get_gradient_edge(weight).node: weight for weight in weights}

    def add(node: Node, gradient: Tensor | None) -> None:
        weight = owners[node]
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    for group in groups:
        if "made" in group:
            for node, gradient in group["made"].items():
                add(node, gradient)
            continue
        arrived = list(zip(group.pop("intermediates"), group.pop("grads"), strict=True))
        slots = [(GradientEdge(node, slot), grad) for node, found in arrived for slot, grad in enumerate(found)]
        given = [(edge, gradient) for edge, gradient in slots if gradient is not None]
        if not given:
            continue
        ends = list(group["params"])  # an order that is the same for both
        # What arrived at a node has in it what the others of its group sent there: it is not to be added once more.
        with ExitStack() as hooks:
            for node, found in arrived:
                hooks.enter_context(node.register_prehook(partial(_instead, found)))
            # Weights that reach the graph of the inputs at several places run parts of it again; it is freed with
            # `groups`.
            made = torch.autograd.grad(
                [edge for edge, _ in given],
                [GradientEdge(node, 0) for node in ends],
                [gradient for _, gradient in given],
                retain_graph=True,
            )
        for node, gradient in zip(ends, made, strict=True):
            add(node, gradient)


def _instead(arrived: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return arrived


def _description(value: Value) -> list[int]:
    if value is None:
        return [_NOTHING]
    if isinstance(value, int):
        return [_NUMBER, value]
    kind = [_DTYPES.index(value.dtype), int(value.requires_grad), int(value.device.type == "cpu"), value.ndim]
    return [*kind, *value.shape, *value.stride()]


def _forms(numbers: list[int]) -> Iterator[_Form | int | None]:
    """Read what `_description` wrote."""
    rest = iter(numbers)
    for _ in range(next(rest)):
        kind = next(rest)
        if kind < 0:
            yield None if kind == _NOTHING else next(rest)
            continue
        wanted, on_host, ndim = islice(rest, 3)
        yield _Form(_DTYPES[kind], bool(wanted), bool(on_host), [*islice(rest, ndim)], [*islice(rest, ndim)])


def _flat(value: Tensor) -> Tensor:
    form = _Form(value.dtype, False, False, list(value.shape), list(value.stride()))
    if form.extent > form.elements:
        return value.contiguous().view(-1)
    return value.as_strided([form.extent], [1], value.storage_offset())
