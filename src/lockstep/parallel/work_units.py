"""A rank's units of work in a micro-batch: the leaves of the tree (core/tree.py) whose forwards run together."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, final

from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.core.batch import Inputs
from lockstep.core.mesh import Mesh
from lockstep.parallel.cooperative import Cooperative
from lockstep.tasks.base import MicroBatch, MicroBatches, Problem


class WorkUnits(Protocol):
    """How a micro-batch is cut into leaves, and what a model is given and called in for each of them.

    A micro-batch is `count` leaves, on all ranks together.
    """

    count: int

    def of(self, microbatch: MicroBatch, microbatches: int) -> MicroBatches:
        """Return this rank's leaves of one of so many micro-batches, as micro-batches with the numbers of leaves."""

    def inputs(self, leaf: MicroBatch) -> Inputs:
        """Return what the model's forward takes for a leaf."""

    def around(self) -> AbstractContextManager[object]:
        """Return the context of the forward of one leaf, or of a part of it."""

    def loss(self, leaf: MicroBatch, compute: Callable[[], Tensor]) -> Tensor | None:
        """Return what `compute` returns for a leaf, or None for one that is another rank's: take part in it instead."""

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """Return what the model's forward takes in evaluation, which is of whole samples, for the task's `inputs`."""


# Given the problem, the model, the number of chunks of a sequence, and what runs forwards together.
MakeWorkUnits = Callable[[Problem, nn.Module, int, World, Mesh, Cooperative], WorkUnits]


@final
class WholeMicroBatches:
    """Micro-batches that are leaves themselves."""

    def __init__(self, problem: Problem) -> None:
        self.count = 1
        self._problem = problem

    def of(self, microbatch: MicroBatch, microbatches: int) -> MicroBatches:
        """See WorkUnits."""
        return [microbatch]

    def inputs(self, leaf: MicroBatch) -> Inputs:
        """See WorkUnits."""
        return self._problem.task.inputs(leaf.batch)

    def around(self) -> AbstractContextManager[object]:
        """See WorkUnits."""
        return nullcontext()

    def loss(self, leaf: MicroBatch, compute: Callable[[], Tensor]) -> Tensor | None:
        """See WorkUnits."""
        return compute()

    def evaluation_inputs(self, inputs: Inputs) -> Inputs:
        """See WorkUnits."""
        return inputs
