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
from lockstep.parallel.gradients import BucketedGradientSum
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, get_trainable_parameters
from lockstep.parallel.tensor.slices import find_split_layers
from lockstep.parallel.weights import ReplicatedLayout
from lockstep.tasks.base import MicroBatch, MicroBatches


def make_sequence_parallel_layout(world: World, mesh: Mesh, bucket_bytes: int, num_chunks: int) -> MakeLayout:
    """Return a function that creates the layout. `num_chunks` is the number of chunks that sequences are split into."""

    def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights = ReplicatedLayout(model, dtype)
        split_parameters = {
            getattr(layer.module, key) for layer in find_split_layers(model).values() for key in layer.parameters
        }

        def make_sum(sum_mesh: Mesh, is_split: bool) -> BucketedGradientSum:
            selected = [
                (name, parameter)
                for name, parameter in get_trainable_parameters(model)
                if (parameter in split_parameters) == is_split
            ]
            canonical = world.make_canonical_sum(sum_mesh, "replicate", "context", num_chunks=num_chunks)
            return BucketedGradientSum(selected, canonical, stream, False, bucket_bytes)

        return weights, SequenceParallelGradients(
            make_sum(mesh.sequence_mesh, is_split=False), make_sum(mesh, is_split=True)
        )

    return make_layout


@final
class SequenceParallelGradients:
    """Two gradient sums: `unsplit_sum` adds this rank's own chunks, and `split_sum` adds all chunks, even dummies."""

    def __init__(self, unsplit_sum: GradientSum, split_sum: GradientSum) -> None:
        self._unsplit = unsplit_sum
        self._split = split_sum

    def begin(self, num_microbatches: int, microbatches: MicroBatches) -> None:
        """See GradientSum."""
        self._unsplit.begin(num_microbatches, microbatches)
        self._split.begin(num_microbatches, [_clear_dummy(microbatch) for microbatch in microbatches])

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._unsplit.before_backward(microbatch)
        self._split.before_backward(_clear_dummy(microbatch))

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._unsplit.after_backward(microbatch)
        self._split.after_backward(_clear_dummy(microbatch))

    def finish(self) -> None:
        """See GradientSum."""
        self._unsplit.finish()
        self._split.finish()


def _clear_dummy(microbatch: MicroBatch) -> MicroBatch:
    return replace(microbatch, is_dummy=False)
