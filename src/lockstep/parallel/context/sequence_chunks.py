"""The chunks of sequences that a rank computes, each by a forward of its own.

Layers see the positions of one chunk, whoever computes them, and a chunk's random numbers and gradients are those of a
leaf of its own in the tree (core/tree.py). The forwards of one micro-batch run together (parallel/cooperative.py), and
know of each other in attention alone (parallel/context/attention.py).

With M micro-batches in a step, leaf c * M + m is chunk c of micro-batch m.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar, final

import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.core.batch import Inputs, call, tensors_of
from lockstep.core.mesh import Mesh
from lockstep.core.order import part
from lockstep.errors import UsageError
from lockstep.parallel.context.attention import KEY, SequenceAttention
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.cooperative import Cooperative
from lockstep.parallel.work_units import WholeMicroBatches, WorkUnits
from lockstep.tasks.base import CutsSequences, MicroBatch, MicroBatches, Problem, Task

T = TypeVar("T")

POSITIONS: Final = "position_ids"  # what models call the argument, as transformers does


@final
class SequenceChunks:
    """The chunks `local_chunks` of the sequences of a micro-batch, whose forwards run in `cooperative`.

    `arguments` are the names of the arguments of the model's forward, in order.
    """

    def __init__(
        self,
        task: CutsSequences,
        arguments: Sequence[str],
        local_chunks: range,
        exchange: Exchange,
        cooperative: Cooperative,
    ) -> None:
        self.count = exchange.chunks
        self._task = task
        self._arguments = arguments
        self._local_chunks = local_chunks
        self._exchange = exchange
        self._cooperative = cooperative
        self._microbatches = 1

    def units_for(self, microbatch: MicroBatch, microbatches: int) -> MicroBatches:
        """See WorkUnits. The weight of each chunk is that of the whole micro-batch."""
        self._microbatches = microbatches
        first, batch = microbatch.index, microbatch.batch
        return [
            replace(microbatch, index=chunk * microbatches + first, batch=self._task.chunk(batch, chunk, self.count))
            for chunk in self._local_chunks
        ]

    def inputs(self, leaf: MicroBatch) -> Inputs:
        """See WorkUnits: a chunk has the positions that it has in the sequence."""
        return with_positions(self._task.inputs(leaf.batch), self._arguments, leaf.index // self._microbatches)

    def around(self) -> SequenceAttention:
        """See WorkUnits."""
        return SequenceAttention(self._exchange, self._cooperative)

    def loss(self, leaf: MicroBatch, compute: Callable[[], T]) -> T | None:
        """See WorkUnits."""
        return compute()

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """See WorkUnits."""
        return with_positions(inputs, self._arguments)

    def call(self, model: nn.Module, leaf: MicroBatch) -> Any:
        """Return what a whole model gives for a chunk; UsageError where it attends to nothing."""
        with self.around() as attention:
            outputs = call(model, self.inputs(leaf))
        attention.check()
        return outputs


def with_positions(inputs: Inputs, arguments: Sequence[str], chunk: int = 0) -> Inputs:
    """Return the inputs of a forward that takes arguments of these names, with the positions of such a chunk."""
    ids = tensors_of(inputs)[0]
    first = chunk * ids.shape[1]
    positions = torch.arange(first, first + ids.shape[1], device=ids.device).unsqueeze(0)
    named = inputs if isinstance(inputs, Mapping) else dict(zip(arguments, inputs, strict=False))
    return {**named, POSITIONS: positions}


def argument_names(model: nn.Module) -> Sequence[str]:
    """Return the names of what the model's forward takes."""
    return [*inspect.signature(model.forward).parameters]


def leaves_of(
    problem: Problem, model: nn.Module, chunks: int, world: World, mesh: Mesh, cooperative: Cooperative
) -> WorkUnits:
    """Return the leaves of this rank, where sequences are cut into `chunks`. All ranks call it alike."""
    if chunks == 1:
        return WholeMicroBatches(problem)
    rank, ranks = mesh.coordinate(world.rank).context, mesh.context
    carrier = world.carrier(mesh, "context", side_stream=False) if ranks > 1 else None
    exchange = Exchange(chunks, rank, ranks, carrier)
    local_chunks = part(chunks, ranks, rank)
    return SequenceChunks(sequence_task(problem.task), argument_names(model), local_chunks, exchange, cooperative)


def sequence_task(task: Task) -> CutsSequences:
    """Return the task as one that cuts sequences; UsageError where it is none."""
    if not isinstance(task, CutsSequences):
        raise UsageError(
            f"{KEY}: task {type(task).__name__} does not support chunks of sequences; use task language without "
            f"recipe.metrics, or remove this key"
        )
    return task
