"""What a strategy is: the contract of each file of this folder, and of a strategy of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from torch import nn

from lockstep.comm.world import World
from lockstep.core.batch import Inputs
from lockstep.core.mesh import Place
from lockstep.parallel.engine import Engine
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.tasks.base import Problem


class Strategy(Protocol):
    """How a model is spread over ranks: a frozen dataclass whose fields are its options.

    An option decides time and memory, never numbers: those are the recipe's. What stands here as a property may be a
    `ClassVar`, as it is in most strategies, or follow from the options.
    """

    @property
    def exactness(self) -> Literal["bits", "close"]:
        """What is promised: `bits`, those of one process, or a result that is `close` to it."""
        ...

    @property
    def cuts(self) -> str:
        """What is shared out among the ranks, in words for `lockstep strategies`."""
        ...

    @property
    def needs(self) -> str:
        """What a model, an optimizer or the number of processes must be like, in words."""
        ...

    @property
    def communication(self) -> str:
        """What ranks send one another, and how often, in words."""
        ...

    @property
    def recomputes(self) -> bool:
        """Whether it has an option `recompute` of its own; else `placement.recompute` is done to the model first."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether a block is called as one, forward and backward; else `recipe.compile` is refused."""
        ...

    @property
    def cuts_model(self) -> bool:
        """Whether a rank computes but a part of the model; `check_model` is then asked whether it can be cut."""
        ...

    @property
    def cuts_rows(self) -> bool:
        """Whether the optimizer sees but rows of tensors: one that treats them otherwise than the whole is refused."""
        ...

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError, before any process starts, for a number of processes or options that cannot work."""
        ...

    def check_model(
        self, build: Callable[[], nn.Module], example: Inputs | None, processes: int, *, whole_blocks: bool = False
    ) -> None:
        """Raise UsageError where the model that `build` builds cannot be cut; needed where `cuts_model` is true.

        `example` has the inputs of two samples, on the meta device, where they are known. With `whole_blocks` no cut
        may lie within a block.
        """
        ...

    def place(self, rank: int, size: int) -> Place:
        """Return where a rank stands among `size`, and so which micro-batches are its own.

        Each micro-batch of a step belongs to one rank that speaks, whatever their number.
        """
        ...

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine (parallel/engine.py) of this rank. All ranks call it at once."""
        ...
