"""What a strategy is: the contract of each file of this folder, and of a strategy of the user's own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch.optim import Optimizer

from lockstep.comm.world import World
from lockstep.core.batch import Inputs
from lockstep.core.mesh import Mesh
from lockstep.parallel.engine import Engine
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.optimizer_state import Named
from lockstep.tasks.base import Build, Problem

# What a strategy's file takes from here, so that it needs few imports of its own.
__all__ = ["Count", "CutsModel", "Engine", "ExternalEngine", "Inputs", "MakeOptimizer", "Mesh", "Mib", "Numerics"]
__all__ += ["Problem", "Strategy", "Traits", "World"]

Count = Annotated[int, Field(ge=1)]
Mib = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Traits:
    """What is to be known of a strategy before it starts; the first three in words, for `lockstep strategies`.

    `cuts` is what the ranks share out, `needs` what a model, an optimizer or the number of processes must be like, and
    `communication` what ranks send each other, and how often. `exactness` promises the `bits` of one process, a
    result `close` to it, or `none` of both: then there is nothing to verify. With `cuts_rows` the optimizer sees rows
    of tensors, and one for which that is not the same as the whole is refused. Unless `compiles`, `recipe.compile` is
    refused: no block is called as one, forward and backward. Unless `audits`, `placement.audit_every` is: no two ranks
    have the same weights. Unless `syncs_batchnorm`, `recipe.batchnorm: sync` is: the engine does not heed it; nor,
    unless `cuts_sequences`, `recipe.model.sequence_chunks`. With `spreads_sequences` ranks along tensor share these
    chunks, too. `sent` is the precision that gradients are rounded to before they are sent, where they are. Where what
    a rank does follows from what others send it, `by_peers`, a rank alone shows nothing (`lockstep plan`). One that
    `unpickles` what it receives lets others run code: only who names it gets it.
    """

    cuts: str
    needs: str
    communication: str
    exactness: Literal["bits", "close", "none"] = "bits"
    cuts_rows: bool = False
    compiles: bool = True
    audits: bool = True
    syncs_batchnorm: bool = False
    cuts_sequences: bool = False
    spreads_sequences: bool = False
    sent: Literal["fp16", "bf16"] | None = None
    by_peers: bool = False
    unpickles: bool = False


class Strategy(Protocol):
    """How a model is spread over ranks: a frozen dataclass whose fields are its options.

    An option decides time and memory, never numbers: those are the recipe's. The exception is one that trades the bits
    of one process for time, as ddp's `compress` does: with it the traits promise less. One named `recompute` takes the
    place of `placement.recompute`, which otherwise is applied to the model before `start`.
    """

    @property
    def traits(self) -> Traits:
        """What is to be known before it starts, with these options."""

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError, before any process starts, for a number of processes or options that cannot work."""

    def mesh(self, processes: int) -> Mesh:
        """Return the ranks as a mesh of so many processes, from which the micro-batches of each follow."""

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine (parallel/engine.py) of this rank. All ranks call it at once."""


@runtime_checkable
class ExternalEngine(Protocol):
    """What a strategy has besides that trains in the engine of another framework."""

    def check_recipe(self, numerics: Numerics, make: Callable[[Iterable[Named]], Optimizer]) -> None:
        """Raise UsageError for what of a recipe the framework cannot do; `make` makes its optimizer."""

    def check_trained(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise UsageError for parameters, by their names, that the framework would train in another dtype."""

    def preload(self) -> None:
        """Import what each rank will need, in the process that forks the ranks of a CPU: they then share it."""

    def files(self, numerics: Numerics) -> Mapping[str, Any]:
        """Return what the framework is given, ready for JSON, by the name of the file that shows it."""


@runtime_checkable
class CutsModel(Protocol):
    """What a strategy has besides whose ranks compute a part of the model each."""

    def check_model(self, build: Build, example: Inputs | None, processes: int, *, whole_blocks: bool = False) -> None:
        """Raise UsageError where the model that `build` builds cannot be cut for so many processes.

        `example` has the inputs of two samples, on the meta device, where they are known. With `whole_blocks` no cut
        may lie within a block.
        """
