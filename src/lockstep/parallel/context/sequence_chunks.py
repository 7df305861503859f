"""Splits the sequences of a micro-batch into chunks, with one forward pass for each chunk.

A layer always sees the positions of a single chunk, regardless of which rank computes the chunk. Each chunk is a
separate leaf of the reduction tree (core/tree.py), with its own random numbers and gradients. The forward passes of the
chunks of a micro-batch run interleaved (parallel/cooperative.py), and only exchange data in attention
(parallel/context/attention.py).

In a step with M micro-batches, leaf c * M + m of the reduction tree is chunk c of micro-batch m.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar, final

import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.core.batch import Inputs, call_model, get_tensors
from lockstep.core.mesh import Mesh
from lockstep.core.order import get_subrange
from lockstep.errors import UsageError
from lockstep.parallel.context.attention import KEY, SequenceAttention
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.parallel.work_units import WholeMicroBatches, WorkUnits
from lockstep.tasks.base import ChunkableTask, MicroBatch, MicroBatches, Problem, Task

T = TypeVar("T")

POSITIONS: Final = "position_ids"  # the argument name that transformers models use


@final
class SequenceChunks:
    """Work units that each contain one chunk of the sequences of a micro-batch. Implements WorkUnits.

    - `task`: Extracts a chunk from a batch.
    - `argument_names`: The argument names of the model's forward method, in order.
    - `local_chunks`: The indices of the chunks on this rank.
    - `exchange`: Exchanges tensors between the chunks in attention.
    - `scheduler`: Runs the forward passes of the chunks interleaved.
    """

    def __init__(
        self,
        task: ChunkableTask,
        argument_names: Sequence[str],
        local_chunks: range,
        exchange: Exchange,
        scheduler: CooperativeScheduler,
    ) -> None:
        self.count = exchange.chunks
        self._task = task
        self._arguments = argument_names
        self._local_chunks = local_chunks
        self._exchange = exchange
        self._cooperative = scheduler
        self._microbatches = 1

    def units_for(self, microbatch: MicroBatch, num_microbatches: int) -> MicroBatches:
        """See WorkUnits. Each chunk has the weight of the full micro-batch."""
        self._microbatches = num_microbatches
        first, batch = microbatch.index, microbatch.batch
        return [
            replace(
                microbatch, index=chunk * num_microbatches + first, batch=self._task.chunk(batch, chunk, self.count)
            )
            for chunk in self._local_chunks
        ]

    def inputs(self, unit: MicroBatch) -> Inputs:
        """See WorkUnits. The position IDs of a chunk count from the start of the full sequence."""
        return add_position_ids(self._task.inputs(unit.batch), self._arguments, unit.index // self._microbatches)

    def forward_context(self) -> SequenceAttention:
        """See WorkUnits."""
        return SequenceAttention(self._exchange, self._cooperative)

    def loss(self, unit: MicroBatch, compute: Callable[[], T]) -> T | None:
        """See WorkUnits."""
        return compute()

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """See WorkUnits."""
        return add_position_ids(inputs, self._arguments)

    def run_model(self, model: nn.Module, unit: MicroBatch) -> Any:
        """Run the full model on one chunk and return its outputs.

        Raises UsageError if the model doesn't call scaled_dot_product_attention.
        """
        with self.forward_context() as attention:
            outputs = call_model(model, self.inputs(unit))
        attention.check()
        return outputs


def add_position_ids(inputs: Inputs, arguments: Sequence[str], chunk: int = 0) -> Inputs:
    """Return `inputs` by argument name, together with the position IDs of chunk number `chunk`."""
    ids = get_tensors(inputs)[0]
    first = chunk * ids.shape[1]
    positions = torch.arange(first, first + ids.shape[1], device=ids.device).unsqueeze(0)
    named = inputs if isinstance(inputs, Mapping) else dict(zip(arguments, inputs, strict=False))
    return {**named, POSITIONS: positions}


def get_argument_names(model: nn.Module) -> Sequence[str]:
    """Return the argument names of the model's forward method, in order."""
    return [*inspect.signature(model.forward).parameters]


def make_work_units(
    problem: Problem, model: nn.Module, num_chunks: int, world: World, mesh: Mesh, scheduler: CooperativeScheduler
) -> WorkUnits:
    """Return the work units of this rank, with each sequence split into `num_chunks` chunks.

    All ranks must call this function with the same arguments.
    """
    if num_chunks == 1:
        return WholeMicroBatches(problem)
    rank, ranks = mesh.get_coordinates(world.rank).context, mesh.context
    carrier = world.make_carrier(mesh, "context", side_stream=False) if ranks > 1 else None
    exchange = Exchange(num_chunks, rank, ranks, carrier)
    local_chunks = get_subrange(num_chunks, ranks, rank)
    return SequenceChunks(
        require_sequence_task(problem.task), get_argument_names(model), local_chunks, exchange, scheduler
    )


def require_sequence_task(task: Task) -> ChunkableTask:
    """Return `task` if it can split sequences into chunks. Otherwise, raise UsageError."""
    if not isinstance(task, ChunkableTask):
        raise UsageError(
            f"{KEY}: task {type(task).__name__} does not support splitting sequences into chunks; use task language "
            f"without recipe.metrics, or remove this key"
        )
    return task
