"""The layout for sequence parallelism: the ranks that split the layers also split the sequences outside these layers.

For its slices of split parameters, each rank computes the gradients of all chunks of a sequence
(tensor/sequence_parallel.py). For all other parameters, it only computes the gradients of its own chunks. Therefore
there are two gradient sums, over different sets of ranks.
"""

from dataclasses import replace
from typing import final

import torch
from torch import nn

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.parallel.gradients import Gradients
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, trainable_parameters
from lockstep.parallel.tensor.slices import split_layers
from lockstep.parallel.weights import Weights
from lockstep.tasks.base import MicroBatch, MicroBatches


def make_sequence_parallel_layout(world: World, mesh: Mesh, bucket_bytes: int, chunks: int) -> MakeLayout:
    """Return a function that creates the layout. `chunks` is the number of chunks that sequences are split into."""

    def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights = Weights(model, dtype)
        split_parameters = {
            getattr(layer.module, key) for layer in split_layers(model).values() for key in layer.parameters
        }

        def make_sum(sum_mesh: Mesh, is_split: bool) -> Gradients:
            selected = [
                (name, parameter)
                for name, parameter in trainable_parameters(model)
                if (parameter in split_parameters) == is_split
            ]
            canonical = world.canonical(sum_mesh, "replicate", "context", chunks=chunks)
            return Gradients(selected, canonical, stream, False, bucket_bytes)

        return weights, SequenceParallelGradients(
            make_sum(mesh.sequence_mesh, is_split=False), make_sum(mesh, is_split=True)
        )

    return make_layout


@final
class SequenceParallelGradients:
    """Two gradient sums: `unsplit` only adds this rank's own chunks, and `split` adds all chunks, including dummies."""

    def __init__(self, unsplit: GradientSum, split: GradientSum) -> None:
        self._unsplit = unsplit
        self._split = split

    def begin(self, leaves: int, microbatches: MicroBatches) -> None:
        """See GradientSum."""
        self._unsplit.begin(leaves, microbatches)
        self._split.begin(leaves, [_as_counted(microbatch) for microbatch in microbatches])

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._unsplit.before_backward(microbatch)
        self._split.before_backward(_as_counted(microbatch))

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._unsplit.after_backward(microbatch)
        self._split.after_backward(_as_counted(microbatch))

    def finish(self) -> None:
        """See GradientSum."""
        self._unsplit.finish()
        self._split.finish()


def _as_counted(microbatch: MicroBatch) -> MicroBatch:
    return replace(microbatch, dummy=False)
