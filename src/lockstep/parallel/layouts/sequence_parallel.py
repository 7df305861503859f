"""The layout for sequence parallelism: a sliced model whose ranks split sequences outside of the sliced regions.

Each rank computes the gradients of its sliced parameters for all chunks of a sequence (tensor/sequence_parallel.py).
The gradients of all other parameters only cover the rank's own chunks. Therefore there are two gradient sums, over
different sets of ranks.
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
from lockstep.parallel.tensor.slices import cut_layers
from lockstep.parallel.weights import Weights
from lockstep.tasks.base import MicroBatch, MicroBatches


def sequence_parallel_layout(world: World, mesh: Mesh, bucket_bytes: int, chunks: int) -> MakeLayout:
    """Return a function that creates the layout. Sequences are split into `chunks` chunks."""

    def make(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights = Weights(model, dtype)
        split_parameters = {
            getattr(layer.module, key) for layer in cut_layers(model).values() for key in layer.parameters
        }

        def adding(sum_mesh: Mesh, is_cut: bool) -> Gradients:
            selected = [
                (name, parameter)
                for name, parameter in trainable_parameters(model)
                if (parameter in split_parameters) == is_cut
            ]
            canonical = world.canonical(sum_mesh, "replicate", "context", chunks=chunks)
            return Gradients(selected, canonical, stream, False, bucket_bytes)

        return weights, SequenceParallelGradients(adding(mesh.spread, is_cut=False), adding(mesh, is_cut=True))

    return make


@final
class SequenceParallelGradients:
    """Sums gradients of `whole` parameters over this rank's chunks, and of `cut` parameters also over dummy chunks."""

    def __init__(self, whole: GradientSum, cut: GradientSum) -> None:
        self._whole = whole
        self._cut = cut

    def begin(self, leaves: int, microbatches: MicroBatches) -> None:
        """See GradientSum."""
        self._whole.begin(leaves, microbatches)
        self._cut.begin(leaves, [_count(microbatch) for microbatch in microbatches])

    def before_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._whole.before_backward(microbatch)
        self._cut.before_backward(_count(microbatch))

    def after_backward(self, microbatch: MicroBatch) -> None:
        """See GradientSum."""
        self._whole.after_backward(microbatch)
        self._cut.after_backward(_count(microbatch))

    def finish(self) -> None:
        """See GradientSum."""
        self._whole.finish()
        self._cut.finish()


def _count(microbatch: MicroBatch) -> MicroBatch:
    return replace(microbatch, dummy=False)
