"""The computation of a stage: forward passes, backward passes, and canonical sums of gradients and statistics.

The inputs of a stage enter its autograd graph through an autograd function that stores their gradients exactly as
computed. Autograd leaves can't be used as inputs, because autograd can change the memory layout of their `grad`, and
because a stage can't modify them in place.

If a micro-batch is split into several leaves of the reduction tree (parallel/work_units.py), the forward passes of the
leaves are interleaved, and a single backward pass goes through all of their graphs (parallel/cooperative.py,
parallel/isolated_grads.py).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from lockstep.comm.canonical import CanonicalSum, add_
from lockstep.comm.p2p import Value, Values, backward_input, backward_weight
from lockstep.core.tree import BinaryCounter, sum_pieces
from lockstep.parallel.batchnorm import RunningStatistics
from lockstep.parallel.buffer_guard import BufferGuard
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.parallel.gradients import (
    add_gradients_,
    allocate_sum,
    flatten_gradients,
    get_wide_gradient,
    iterate_backward_nodes,
    partition_into_buckets,
    set_gradients,
    unflatten_gradients,
)
from lockstep.parallel.isolated_grads import IsolatedGradients

Gradients = list[Tensor | None]
Compute = Callable[[Values], Sequence[Tensor | int]]
EdgeGradientPairs = list[tuple[GradientEdge, Tensor]]
LentGradients = Sequence[tuple[nn.Parameter, Tensor]]  # lent parameters with the gradients from the borrowers

_BUCKET_BYTES: Final = 32 << 20  # limits the memory of the flat copies of gradients


class ForwardPass(NamedTuple):
    """A forward pass of a stage on leaf `leaf_index` of the reduction tree. `compute` maps `inputs` to the outputs."""

    leaf_index: int
    inputs: Values
    compute: Compute


class BackwardInputs(NamedTuple):
    """The inputs of a backward pass: the gradients of the stage's outputs, and the borrowers' gradients."""

    gradients: Values
    lent_gradients: LentGradients = ()


class BackwardResult(NamedTuple):
    """The results of a backward pass: the gradients of the stage's inputs, and the gradients of borrowed parameters."""

    input_gradients: Gradients
    borrowed_gradients: Gradients


@dataclass(eq=False)
class _Leaf:
    """A leaf of the reduction tree between its forward pass and its backward pass."""

    number: int
    differentiable_inputs: list[Tensor]  # the inputs that require a gradient
    input_grads: dict[int, Tensor]  # by input index, filled in the backward pass
    num_inputs: int
    edges: list[GradientEdge | None]  # of the outputs; None if an output requires no gradient

    def list_input_gradients(self) -> Gradients:
        return [self.input_grads.get(index) for index in range(self.num_inputs)]


@dataclass(eq=False)
class _InFlightMicroBatch:
    """A micro-batch between its forward and backward pass. `isolated` is None if the micro-batch is a single leaf."""

    leaves: list[_Leaf]
    isolated: IsolatedGradients | None
    finish: Callable[[], list[Tensor]] | None = None  # runs the deferred part of a backward pass


@final
@dataclass(eq=False)
class Stage:
    """A stage of a model. `part` contains its tensors.

    If `recompute` is set, the stage saves its inputs instead of its activations. `borrowed` are the parameters that a
    different stage owns. Backward passes return their gradients, so that the engine can send them to the owner.
    """

    part: InitVar[nn.Module]
    scheduler: CooperativeScheduler
    recompute: bool = False
    borrowed: Sequence[Tensor] = ()
    guarded: InitVar[bool] = True
    compiled: InitVar[bool] = False

    def __post_init__(self, part: nn.Module, guarded: bool, compiled: bool) -> None:
        self.running = RunningStatistics(part, count_calls=not compiled)
        self._guarded = BufferGuard(part, self.running.buffers).watch if guarded else nullcontext
        self.parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]
        self.observations = torch.empty(0)  # the statistics of the last step, averaged over samples
        self._in_flight: dict[int, Callable[[], _InFlightMicroBatch]] = {}
        self._deferred: dict[int, _InFlightMicroBatch] = {}
        self._gradients: BinaryCounter[list[Tensor]] = BinaryCounter(add_gradients_)
        self._statistics: BinaryCounter[Tensor] = BinaryCounter(add_)

    def forward(self, forwards: Sequence[ForwardPass], num_samples: int, module: nn.Module) -> list[list[Tensor | int]]:
        """Run the forward passes of the leaves of a micro-batch, and return the detached outputs of each leaf.

        `num_samples` is the number of samples in the micro-batch, and `module` has the parameters of the stage. The
        other methods identify the micro-batch by the number of its first leaf. With recomputation, each forward pass
        runs again before the backward pass, and must return the same results.
        """
        number = forwards[0].leaf_index
        self.running.before_forward()
        with self._guarded():
            if self.recompute:
                _, outputs = self._start_forwards([_without_saved_tensors(forward) for forward in forwards], module)
                self._in_flight[number] = lambda: self._start_forwards(forwards, module)[0]
            else:
                in_flight, outputs = self._start_forwards(forwards, module)
                self._in_flight[number] = lambda: in_flight
        if self.running.size:
            self._statistics.push(number, self.running.get_weighted_statistics(num_samples))
        return [[_detach(output) for output in leaf_outputs] for leaf_outputs in outputs]

    def backward(self, number: int, inputs: Sequence[BackwardInputs]) -> list[BackwardResult]:
        """Run the backward pass of micro-batch `number`, and return the results for each leaf."""
        in_flight = self._in_flight.pop(number)()
        isolated = in_flight.isolated
        leaves_and_inputs = list(zip(in_flight.leaves, inputs, strict=True))
        _run_backward(
            [pair for leaf, (gradients, _) in leaves_and_inputs for pair in _pair_edges_with_gradients(leaf, gradients)]
        )
        if isolated is not None:
            isolated.check()
        results = []
        for index, (leaf, (_, lent_gradients)) in enumerate(leaves_and_inputs):
            if isolated is not None:
                isolated.move_gradients(index)
            self._gradients.push(leaf.number, _take_gradients(self.parameters, lent_gradients))
            results.append(BackwardResult(leaf.list_input_gradients(), self._pop_borrowed_gradients()))
        return results

    def backward_input(self, number: int, inputs: Sequence[BackwardInputs]) -> list[BackwardResult]:
        """Compute the input gradients of micro-batch `number`, and leave the weight gradients to `backward_weight`.

        The micro-batch must be a single leaf of the reduction tree. If the stage has borrowed parameters, all gradients
        are computed immediately.
        """
        in_flight = self._in_flight.pop(number)()
        [leaf], [(gradients, lent_gradients)] = in_flight.leaves, inputs
        pairs = _pair_edges_with_gradients(leaf, gradients)
        if not leaf.differentiable_inputs and not self.borrowed:
            in_flight.finish = lambda: _run_full_backward(pairs, self.parameters, lent_gradients)
        elif not self.borrowed and all(_reaches_input(edge.node) for edge, _ in pairs):
            in_flight.finish = _start_split_backward(leaf, pairs, self.parameters, lent_gradients)
        else:  # a split backward pass would lose the weight gradients of outputs that don't depend on any input
            taken_gradients = _run_full_backward(pairs, self.parameters, lent_gradients)
            in_flight.finish = lambda: taken_gradients
        self._deferred[number] = in_flight
        return [BackwardResult(leaf.list_input_gradients(), self._pop_borrowed_gradients())]

    def backward_weight(self, number: int) -> None:
        """Compute the weight gradients of micro-batch `number`, which `backward_input` deferred."""
        in_flight = self._deferred.pop(number)
        assert in_flight.finish is not None
        [leaf] = in_flight.leaves
        self._gradients.push(leaf.number, in_flight.finish())

    def add_gradients(self, num_leaves: int, canonical_sum: CanonicalSum) -> None:
        """Store the canonical gradient sums of a step in `grad`. The reduction tree has `num_leaves` leaves.

        `canonical_sum` sums over the ranks with the same stage. All of these ranks must call this method.
        """
        pieces = self._gradients.pop_pieces()
        if canonical_sum.is_single_rank:  # no flat buffers are necessary
            set_gradients(self.parameters, sum_pieces(pieces, num_leaves, add_gradients_))
            return
        positions = {parameter: number for number, parameter in enumerate(self.parameters)}
        for bucket in partition_into_buckets(self.parameters, _BUCKET_BYTES):
            bucket_parts = {
                block: [parts[positions[parameter]] for parameter in bucket] for block, parts in pieces.items()
            }
            flat = {block: flatten_gradients(parts, bucket) for block, parts in bucket_parts.items()}
            set_gradients(bucket, unflatten_gradients(canonical_sum(flat, num_leaves, allocate_sum(bucket)), bucket))

    def average_statistics(self, num_leaves: int, num_samples: int, canonical_sum: CanonicalSum) -> None:
        """Set `observations` to the BatchNorm statistics of a step, averaged over its samples.

        All ranks with this stage must call this method.
        """
        if self.running.size:
            like = torch.empty(self.running.size, dtype=torch.float64, device=self.parameters[0].device)
            statistics = self._statistics.pop_pieces()
            total_statistics = canonical_sum(statistics, num_leaves, like)
            self.observations = total_statistics / num_samples

    def update_running_statistics(self, applied: bool) -> None:
        """Update BatchNorm's running statistics with `observations`, or discard them if the step wasn't applied."""
        self.running.finish_step(applied, self.observations)

    def _start_forwards(
        self, forwards: Sequence[ForwardPass], module: nn.Module
    ) -> tuple[_InFlightMicroBatch, list[Sequence[Tensor | int]]]:
        isolated = None
        if len(forwards) == 1:
            started = [_start_forward(forwards[0])]
        else:
            isolated = IsolatedGradients(module, len(forwards))
            with isolated.restore_after():
                started = self.scheduler.run(
                    [partial(_start_forward, forward) for forward in forwards], isolated.activate
                )
        return _InFlightMicroBatch([leaf for leaf, _ in started], isolated), [outputs for _, outputs in started]

    def _pop_borrowed_gradients(self) -> Gradients:
        """Return the gradients of the borrowed parameters, and set their `grad` to None."""
        gradients = []
        for tensor in self.borrowed:
            gradients.append(tensor.grad)
            tensor.grad = None
        return gradients


@final
class _Enter(torch.autograd.Function):
    """The identity. In the backward pass, stores the gradient in `input_grads` instead of propagating it."""

    @staticmethod
    def forward(ctx: Any, input_tensor: Tensor, input_grads: dict[int, Tensor], input_index: int) -> Tensor:
        ctx.input_grads, ctx.index = input_grads, input_index
        ctx.set_materialize_grads(False)
        return input_tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None]:
        if gradient is not None:
            ctx.input_grads[ctx.index] = gradient
        return None, None, None


def _start_forward(forward: ForwardPass) -> tuple[_Leaf, Sequence[Tensor | int]]:
    number, inputs, compute = forward
    input_grads: dict[int, Tensor] = {}
    differentiable_inputs = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    entered_values: Values = [
        _Enter.apply(value, input_grads, index) if isinstance(value, Tensor) and value.requires_grad else value
        for index, value in enumerate(inputs)
    ]
    outputs = compute(entered_values)
    edges = [
        get_gradient_edge(output) if isinstance(output, Tensor) and output.requires_grad else None for output in outputs
    ]
    return _Leaf(number, differentiable_inputs, input_grads, len(inputs), edges), outputs


def _detach(output: Tensor | int) -> Tensor | int:
    return output.detach().requires_grad_(output.requires_grad) if isinstance(output, Tensor) else output


def _without_saved_tensors(forward: ForwardPass) -> ForwardPass:
    """Return a copy of `forward` that saves no tensors for a backward pass, and doesn't modify its inputs."""

    def compute(values: Values) -> Sequence[Tensor | int]:
        with saved_tensors_hooks(_discard, _discard):
            return forward.compute(values)

    return ForwardPass(forward.leaf_index, [_copy_input(value) for value in forward.inputs], compute)


def _copy_input(value: Value) -> Value:
    """Copy an input, because the stage may modify it in place, and recomputation reads it again."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _discard(_: Any) -> Any:
    return None


def _pair_edges_with_gradients(leaf: _Leaf, gradients: Values) -> EdgeGradientPairs:
    pairs = zip(leaf.edges, gradients, strict=True)
    return [(edge, gradient) for edge, gradient in pairs if edge is not None and isinstance(gradient, Tensor)]


def _run_backward(pairs: EdgeGradientPairs) -> None:
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])


def _run_full_backward(
    pairs: EdgeGradientPairs, parameters: Sequence[nn.Parameter], lent_gradients: LentGradients
) -> list[Tensor]:
    _run_backward(pairs)
    return _take_gradients(parameters, lent_gradients)


def _start_split_backward(
    leaf: _Leaf, pairs: EdgeGradientPairs, parameters: Sequence[nn.Parameter], lent_gradients: LentGradients
) -> Callable[[], list[Tensor]]:
    edges, gradients = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
    groups = backward_input(edges, gradients, leaf.differentiable_inputs, parameters)
    # Clone weight gradients that share memory with a tensor that is being sent, because gradients are added in place.
    sent_addresses = {gradient.data_ptr() for gradient in [*gradients, *leaf.input_grads.values()]}

    def finish() -> list[Tensor]:
        backward_weight(groups, parameters)
        return [
            gradient.clone() if gradient.data_ptr() in sent_addresses else gradient
            for gradient in _take_gradients(parameters, lent_gradients)
        ]

    return finish


def _reaches_input(node: Node) -> bool:
    return any(reachable.name() == "_EnterBackward" for reachable in iterate_backward_nodes(node))


def _take_gradients(parameters: Sequence[nn.Parameter], lent_gradients: LentGradients) -> list[Tensor]:
    """Return the gradients of `parameters`, and set their `grad` to None. Missing gradients are zeros.

    Each gradient has the strides of its parameter. The gradients of lent parameters include `lent_gradients`, which
    are added in their own dtype and in autograd's order.
    """
    for parameter, gradient in lent_gradients:
        parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
    taken_gradients = []
    for parameter in parameters:
        gradient, parameter.grad = get_wide_gradient(parameter), None
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        taken_gradients.append(gradient.detach())
    return taken_gradients
