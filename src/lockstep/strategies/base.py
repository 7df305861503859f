"""The interface of a strategy, for each file of this folder and for your own strategies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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

# The names that strategies import from here, so that they need few imports.
__all__ = ["Count", "CutsModel", "Engine", "ExternalEngine", "Inputs", "MakeOptimizer", "Mesh", "Mib", "Numerics"]
__all__ += ["Problem", "Strategy", "Traits", "World", "replica_devices"]

Count = Annotated[int, Field(ge=1)]
Mib = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that are known before it starts.

    The first three are texts for `lockstep strategies`:

    - `cuts`: what the ranks shard.
    - `needs`: the requirements on the model, the optimizer and the number of processes.
    - `communication`: what ranks send each other, and how often.

    The other properties:

    - `exactness`: `bits` promises the same bits as one process, and `close` promises a result that is close to it.
      `none` promises neither, so there is nothing to verify.
    - `cuts_rows`: the optimizer sees rows of tensors. An optimizer whose result on rows differs needs `lends_wholes`.
    - `lends_wholes`: if an optimizer needs whole tensors, each tensor has an owner that updates it
      (parallel/layouts/owned.py).
    - `compiles`: if False, `recipe.compile` is rejected, because no block is called as a whole, forward and backward.
    - `audits`: if False, `placement.audit_every` is rejected, because no two ranks have the same weights.
    - `syncs_batchnorm`: if False, `recipe.batchnorm: sync` is rejected, because the engine doesn't support it.
    - `cuts_sequences`: if False, `recipe.model.sequence_chunks` is rejected, because the engine doesn't support it.
    - `spreads_sequences`: ranks along tensor share the chunks of sequences, too.
    - `sent`: the precision to which gradients are rounded before they are sent, or None if they aren't rounded.
    - `by_peers`: the work of a rank depends on data from other ranks, so a single rank can't be measured alone
      (`lockstep plan`).
    - `unpickles`: a rank unpickles data that it receives, so its peers can run code on it. The strategy is only used if
      you name it.
    """

    cuts: str
    needs: str
    communication: str
    exactness: Literal["bits", "close", "none"] = "bits"
    cuts_rows: bool = False
    lends_wholes: bool = False
    compiles: bool = True
    audits: bool = True
    syncs_batchnorm: bool = False
    cuts_sequences: bool = False
    spreads_sequences: bool = False
    sent: Literal["fp16", "bf16"] | None = None
    by_peers: bool = False
    unpickles: bool = False


class Strategy(Protocol):
    """A way to distribute a model over ranks. It is a frozen dataclass, and its fields are its options.

    Options change time and memory, but not the numbers, which are set by the recipe. The exception is an option that
    gives up the bits of one process for speed, such as `compress` of ddp. With such an option, the traits promise less.
    An option named `recompute` replaces `placement.recompute`, which is otherwise applied to the model before `start`.
    """

    @property
    def traits(self) -> Traits:
        """The properties of the strategy with these options."""

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError for options or a number of processes that can't work. Called before any process starts."""

    def mesh(self, processes: int) -> Mesh:
        """Return the mesh of `processes` ranks. It determines the micro-batches of each rank."""

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine (parallel/engine.py) of this rank. All ranks must call this method."""


@runtime_checkable
class ExternalEngine(Protocol):
    """The additional interface of a strategy that trains in the engine of a different framework."""

    def check_recipe(self, numerics: Numerics, make: Callable[[Iterable[Named]], Optimizer]) -> None:
        """Raise UsageError for parts of the recipe that the framework doesn't support. `make` makes its optimizer."""

    def check_trained(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise UsageError if the framework would train a parameter in a different dtype. `dtypes` are by name."""

    def preload(self) -> None:
        """Import the modules that each rank needs in the process that forks the CPU ranks, so that ranks share them."""

    def files(self, numerics: Numerics) -> Mapping[str, Any]:
        """Return the configuration of the framework, ready for JSON, by the name of the file that shows it."""


@runtime_checkable
class HasReplicas(Protocol):
    """The additional interface of a strategy in which one process computes on several devices."""

    def replica_devices(self, cards: int) -> Sequence[torch.device]:
        """Return the device of each replica. Raise UsageError if it doesn't exist. Called before any process starts.

        `cards` is the number of CUDA devices, or 0 on a CPU.
        """


def replica_devices(strategy: Strategy, on_gpu: bool) -> Sequence[torch.device]:
    """Return the device of each replica in this process, or an empty sequence if the process uses one device."""
    if not isinstance(strategy, HasReplicas):
        return ()
    return strategy.replica_devices(torch.cuda.device_count() if on_gpu else 0)


@runtime_checkable
class CutsModel(Protocol):
    """The additional interface of a strategy in which each rank computes a part of the model."""

    def check_model(self, build: Build, example: Inputs | None, processes: int, *, whole_blocks: bool = False) -> None:
        """Raise UsageError if the model that `build` builds can't be split for this number of processes.

        `example` are the inputs of two samples on the meta device, or None if they aren't known. With `whole_blocks`,
        the model is never split within a block.
        """
