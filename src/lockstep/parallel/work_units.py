"""The work units of a rank in a micro-batch: leaves of the reduction tree (core/tree.py) that run interleaved."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar, final

from torch import nn

from lockstep.comm.world import World
from lockstep.core.batch import Inputs
from lockstep.core.mesh import Mesh
from lockstep.parallel.cooperative import Cooperative
from lockstep.tasks.base import MicroBatch, MicroBatches, Problem

T = TypeVar("T")


class WorkUnits(Protocol):
    """Splits micro-batches into leaves of the reduction tree, and provides the inputs and the context of each leaf.

    `count` is the number of leaves of the reduction tree per micro-batch, over all ranks.
    """

    count: int

    def units_for(self, microbatch: MicroBatch, microbatches: int) -> MicroBatches:
        """Return this rank's leaves of the reduction tree for a micro-batch. Their `index` is the index of the leaf.

        `microbatches` is the number of micro-batches in the step.
        """

    def inputs(self, leaf: MicroBatch) -> Inputs:
        """Return the model inputs for a leaf of the tree."""

    def around(self) -> AbstractContextManager[object]:
        """Return the context for the forward pass of a leaf, or for a part of this forward pass."""

    def loss(self, leaf: MicroBatch, compute: Callable[[], T]) -> T | None:
        """Return the result of `compute` for a leaf. If it belongs to another rank, take part and return None."""

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """Return the model inputs for an evaluation, which uses full samples, given the `inputs` of the task."""


# Arguments: the problem, the model, the number of chunks of a sequence, the world, the mesh, and the Cooperative that
# runs the forward passes interleaved.
MakeWorkUnits = Callable[[Problem, nn.Module, int, World, Mesh, Cooperative], WorkUnits]


@final
class WholeMicroBatches:
    """The default work units: each micro-batch is one leaf of the reduction tree."""

    def __init__(self, problem: Problem) -> None:
        self.count = 1
        self._problem = problem

    def units_for(self, microbatch: MicroBatch, microbatches: int) -> MicroBatches:
        """See WorkUnits."""
        return [microbatch]

    def inputs(self, leaf: MicroBatch) -> Inputs:
        """See WorkUnits."""
        return self._problem.task.inputs(leaf.batch)

    def around(self) -> AbstractContextManager[object]:
        """See WorkUnits."""
        return nullcontext()

    def loss(self, leaf: MicroBatch, compute: Callable[[], T]) -> T | None:
        """See WorkUnits."""
        return compute()

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """See WorkUnits."""
        return inputs
