"""Work units: micro-batches, or the parts of micro-batches that are leaves of the reduction tree (core/tree.py)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar, final

from torch import nn

from lockstep.comm.world import World
from lockstep.core.batch import Inputs
from lockstep.core.mesh import Mesh
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.tasks.base import MicroBatch, MicroBatches, Problem

T = TypeVar("T")


class WorkUnits(Protocol):
    """Splits micro-batches into work units, and provides the model inputs and the context for each unit.

    Each unit is a leaf of the reduction tree (core/tree.py). `count` is the number of units per micro-batch over all
    ranks.
    """

    count: int

    def units_for(self, microbatch: MicroBatch, num_microbatches: int) -> MicroBatches:
        """Return this rank's units of a micro-batch. The `index` of a unit is its leaf index in the reduction tree.

        `num_microbatches` is the number of micro-batches in the step.
        """

    def inputs(self, unit: MicroBatch) -> Inputs:
        """Return the model inputs for a unit."""

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context manager in which to run the forward pass of a unit, or one pipeline stage of it."""

    def loss(self, unit: MicroBatch, compute: Callable[[], T]) -> T | None:
        """Compute and return the loss of a unit by calling `compute`.

        If a different rank owns the unit, this method only participates in the unit's collectives, and returns None.
        """

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """Return the model inputs for an evaluation on full samples. `inputs` are the inputs that the task returned."""


# Creates the work units of a rank. Arguments: the problem, the model, the number of chunks per sequence, the world, the
# mesh, and the scheduler that interleaves the forward passes.
MakeWorkUnits = Callable[[Problem, nn.Module, int, World, Mesh, CooperativeScheduler], WorkUnits]


@final
class WholeMicroBatches:
    """The default work units: each micro-batch is a single unit."""

    def __init__(self, problem: Problem) -> None:
        self.count = 1
        self._problem = problem

    def units_for(self, microbatch: MicroBatch, num_microbatches: int) -> MicroBatches:
        """See WorkUnits."""
        return [microbatch]

    def inputs(self, unit: MicroBatch) -> Inputs:
        """See WorkUnits."""
        return self._problem.task.inputs(unit.batch)

    def forward_context(self) -> AbstractContextManager[object]:
        """See WorkUnits."""
        return nullcontext()

    def loss(self, unit: MicroBatch, compute: Callable[[], T]) -> T | None:
        """See WorkUnits."""
        return compute()

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """See WorkUnits."""
        return inputs
