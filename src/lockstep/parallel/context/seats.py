"""The chunks of sequences that a rank computes, each by a forward of its own: its *seats*.

Layers see the positions of one chunk, whoever computes them, and a chunk's random numbers and gradients are those of a
leaf of its own in the tree (core/tree.py). The forwards of one micro-batch run together (parallel/together.py), and
know of each other in attention alone (parallel/context/attention.py).

With M micro-batches in a step, leaf c * M + m is chunk c of micro-batch m.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.core.batch import Inputs, tensors_of
from lockstep.core.mesh import Mesh
from lockstep.core.order import part
from lockstep.errors import UsageError
from lockstep.parallel.context.attention import KEY, Attention
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.together import Together
from lockstep.tasks.base import CutsSequences, MicroBatch, Task

POSITIONS: Final = "position_ids"  # what models call the argument, as transformers does


@final
class Seats:
    """The chunks `own` of the sequences of a micro-batch, whose forwards run in `together`."""

    def __init__(self, task: CutsSequences, own: range, exchange: Exchange, together: Together) -> None:
        self.chunks = exchange.seats
        self._task = task
        self._own = own
        self._exchange = exchange
        self._together = together
        self._microbatches = 1

    def of(self, microbatch: MicroBatch, microbatches: int) -> list[MicroBatch]:
        """Return this rank's chunks of one of so many micro-batches, which then are what `call` calls a model for.

        The weight of each is that of the whole micro-batch.
        """
        self._microbatches = microbatches
        return [
            replace(
                microbatch,
                index=chunk * microbatches + microbatch.index,
                batch=self._task.chunk(microbatch.batch, chunk, self.chunks),
            )
            for chunk in self._own
        ]

    def call(self, model: nn.Module, inputs: Inputs, leaf: int) -> Any:
        """Return what the model gives for the inputs of a chunk, at its positions."""
        ids = tensors_of(inputs)[0]
        first = leaf // self._microbatches * ids.shape[1]
        positions = torch.arange(first, first + ids.shape[1], device=ids.device).unsqueeze(0)
        attention = Attention(self._exchange, self._together)
        with attention:
            if isinstance(inputs, Mapping):
                outputs = model(**inputs, **{POSITIONS: positions})
            else:
                outputs = model(*inputs, **{POSITIONS: positions})
        attention.check()
        return outputs


def seated(task: Task, chunks: int, world: World, mesh: Mesh, together: Together) -> Seats:
    """Return the seats of this rank, where sequences are cut into `chunks`. All ranks call it alike."""
    rank, ranks = mesh.coordinate(world.rank).context, mesh.context
    carrier = world.carrier(mesh, "context", beside=False) if ranks > 1 else None
    return Seats(cutting(task), part(chunks, ranks, rank), Exchange(chunks, rank, ranks, carrier), together)


def cutting(task: Task) -> CutsSequences:
    """Return the task as one that cuts sequences; UsageError where it is none."""
    if not isinstance(task, CutsSequences):
        raise UsageError(
            f"{KEY}: the task ({type(task).__name__}) does not cut its batches into chunks of sequences; use the task "
            f"language, without recipe.metrics, or leave the key out"
        )
    return task
