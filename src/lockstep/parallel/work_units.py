"""The work units of a rank in a micro-batch: the leaves of the tree (core/tree.py) that it runs interleaved."""

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
    """Splits micro-batches into leaves, and provides the inputs and the context for the forward of each leaf.

    `count` is the number of leaves of a micro-batch, over all ranks.
    """

    count: int

    def units_for(self, microbatch: MicroBatch, microbatches: int) -> MicroBatches:
        """Return this rank's leaves of a micro-batch. They are micro-batches whose `index` is the index of the leaf.

        `microbatches` is the number of micro-batches in the step.
        """

    def inputs(self, leaf: MicroBatch) -> Inputs:
        """Return the model inputs for a leaf."""

    def around(self) -> AbstractContextManager[object]:
        """Return the context for the forward of a leaf, or of a part of it."""

    def loss(self, leaf: MicroBatch, compute: Callable[[], T]) -> T | None:
        """Return the result of `compute` for a leaf. If the leaf belongs to another rank, take part and return None."""

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """Return the model inputs for an evaluation, which uses full samples, given the `inputs` of the task."""


# Arguments: the problem, the model, the number of chunks of a sequence, the world, the mesh, and the Cooperative that
# runs the forwards interleaved.
MakeWorkUnits = Callable[[Problem, nn.Module, int, World, Mesh, Cooperative], WorkUnits]


@final
class WholeMicroBatches:
    """The default work units: each micro-batch is one leaf."""

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
