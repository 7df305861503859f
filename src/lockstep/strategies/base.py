"""The interface of a strategy, which the strategies in this folder and custom strategies implement."""

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
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.tasks.base import ModelFactory, Problem

# Re-exported, so that a strategy module can import everything it needs from here.
__all__ = [
    "Count",
    "Engine",
    "ExternalEngineStrategy",
    "Inputs",
    "MakeOptimizer",
    "Mesh",
    "Mib",
    "Numerics",
    "PartitionedModelStrategy",
]
__all__ += ["Problem", "Strategy", "Traits", "World", "replica_devices"]

Count = Annotated[int, Field(ge=1)]
Mib = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that are known before it starts.

    `lockstep strategies` prints the first three as text:

    - `cuts`: the data, tensors or layers that are sharded or split across ranks.
    - `needs`: the requirements on the model, the optimizer and the number of processes.
    - `communication`: the data that ranks send to each other, and how often.

    The remaining properties are:

    - `exactness`: `bits` if the result has the same bits as with one process, `close` if it is within a tolerance, and
      `none` if it is neither, so there is nothing to verify.
    - `cuts_rows`: each rank's optimizer updates only some rows of a tensor. An optimizer that can't update rows
      independently requires `lends_wholes`.
    - `lends_wholes`: supports optimizers that need full tensors, by letting one owner rank update each tensor
      (parallel/layouts/owned.py).
    - `compiles`: if False, `recipe.compile` is rejected, because the engine doesn't run the forward pass or the
      backward pass of a full block in one call.
    - `audits`: if False, `placement.audit_every` is rejected, because no two ranks have the same weights.
    - `syncs_batchnorm`: if False, `recipe.batchnorm: sync` is rejected, because the engine doesn't support it.
    - `cuts_sequences`: if False, `recipe.model.sequence_chunks` is rejected, because the engine doesn't support it.
    - `spreads_sequences`: ranks along the tensor axis also split sequences (parallel/tensor/sequence_parallel.py).
    - `sent`: the precision to which gradients are rounded before they are sent, or None if they aren't rounded.
    - `by_peers`: the work of a rank depends on data from other ranks, so `lockstep plan` can't measure a single rank in
      isolation.
    - `unpickles`: a rank unpickles data that it receives, so its peers can run arbitrary code on this rank. Lockstep
      only uses such a strategy if you request it by name.
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
    """A way to distribute training over ranks. A strategy is a frozen dataclass, and its fields are its options.

    Options affect time and memory but not the results, which only depend on the recipe. The exceptions are options that
    trade exactness for speed, such as `compress` of ddp. If you set such an option, `traits.exactness` is weaker. An
    option named `recompute` replaces `placement.recompute`, which is otherwise applied to the model before `start`.
    """

    @property
    def traits(self) -> Traits:
        """The properties of the strategy with its current options."""

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError for invalid options or an invalid number of processes. Called before any process starts."""

    def mesh(self, processes: int) -> Mesh:
        """Return the mesh of `processes` ranks, which determines the micro-batches that each rank computes."""

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine (parallel/engine.py) of this rank. All ranks must call this method."""


@runtime_checkable
class ExternalEngineStrategy(Protocol):
    """The additional interface of a strategy that trains with the engine of another framework."""

    def check_recipe(self, numerics: Numerics, make_optimizer: Callable[[Iterable[NamedParameter]], Optimizer]) -> None:
        """Raise UsageError if the framework doesn't support the recipe or the optimizer from `make_optimizer`."""

    def check_trained_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise UsageError if the framework would train a parameter in a dtype other than its own.

        `dtypes` maps the names of the trained parameters to their dtypes.
        """

    def preload(self) -> None:
        """Import the modules that each rank needs. Called before the CPU ranks are forked, so that they share them."""

    def make_config_files(self, numerics: Numerics) -> Mapping[str, Any]:
        """Return the JSON-serializable contents of the framework's configuration files, by file name."""


@runtime_checkable
class ReplicatedModelStrategy(Protocol):
    """The additional interface of a strategy in which one process computes on several devices."""

    def replica_devices(self, num_gpus: int) -> Sequence[torch.device]:
        """Return the device of each replica. Called before the launch.

        `num_gpus` is the number of CUDA devices, or 0 on a CPU. Raises UsageError if a device doesn't exist.
        """


def replica_devices(strategy: Strategy, on_gpu: bool) -> Sequence[torch.device]:
    """Return the device of each replica in this process, or () if the strategy uses one device per process."""
    if not isinstance(strategy, ReplicatedModelStrategy):
        return ()
    return strategy.replica_devices(torch.cuda.device_count() if on_gpu else 0)


@runtime_checkable
class PartitionedModelStrategy(Protocol):
    """The additional interface of a strategy that partitions the model across ranks."""

    def check_model(
        self, build: ModelFactory, example: Inputs | None, processes: int, *, whole_blocks: bool = False
    ) -> None:
        """Raise UsageError if the model that `build` returns can't be split for this number of processes.

        `example` contains the inputs of two samples on the meta device, or None if the inputs aren't known. If
        `whole_blocks` is set, the model is never split within a block.
        """
