"""Prepares a recipe: opens and checks the data, the model and the optimizer of a configuration.

Every command that runs a recipe uses this module, so that all commands reject the same mistakes.
"""

from dataclasses import dataclass
from typing import final

from lockstep.common.user_source import source_digests
from lockstep.config.blame import add_key_positions
from lockstep.config.load import Loaded
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.run import RunConfig
from lockstep.setup.build import Setup, setup
from lockstep.setup.checks import check_cut, check_kernels, check_placement
from lockstep.setup.first_weights import InitialWeights, load_first_weights
from lockstep.setup.resolved import Resolved, resolve
from lockstep.setup.resume import check_first
from lockstep.strategies.base import Strategy


@final
@dataclass(frozen=True)
class PreparedRun:
    """A recipe and its placement. The data, the model and the optimizer are open and have been checked."""

    resolved: Resolved
    ready: Setup

    @property
    def loaded(self) -> Loaded:
        """The configuration, with the hash of its initial weights."""
        return self.resolved.loaded

    @property
    def recipe(self) -> Recipe:
        """The recipe section, which determines the weights."""
        return self.resolved.recipe

    @property
    def placement(self) -> Placement:
        """The placement section, which determines on which devices and how fast the model is trained."""
        return self.resolved.placement

    @property
    def run(self) -> RunConfig:
        """The run section, which determines what is saved."""
        return self.resolved.run

    @property
    def strategy(self) -> Strategy:
        """The strategy, which determines how the processes share the work."""
        return self.resolved.strategy

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.resolved.processes

    @property
    def sources(self) -> dict[str, str]:
        """The hashes of the user's source files that the recipe and the strategy import.

        A checkpoint stores only the hashes of the recipe's source files, because the strategy can change when a run
        resumes.
        """
        name = self.resolved.strategy_name
        return {**self.ready.source, **source_digests([name] if ":" in name else [])}


@final
@dataclass(frozen=True)
class Placed:
    """A configuration that has been checked against its placement, and its initial weights. No dataset is open yet."""

    resolved: Resolved
    first: InitialWeights | None = None

    def open(self, *, training: bool = True) -> PreparedRun:
        """Open the data, the model and the optimizer. Raise UsageError if they don't match the placement."""
        with add_key_positions(self.resolved.loaded):
            ready = open_recipe(self.resolved.loaded, self.first, training=training)
            check_cut(self.resolved, ready)
        return PreparedRun(self.resolved, ready)


def check(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> Resolved:
    """Resolve a configuration for `processes` processes. Defaults to the number that it requests on this machine.

    Raises UsageError for mistakes in the configuration itself. With `training=False`, this function checks an
    evaluation, which can use more processes than a step has micro-batches, because it doesn't split steps.
    """
    with add_key_positions(loaded):
        resolved = resolve(loaded, processes)
        check_placement(resolved, training=training)
    return resolved


def place(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> Placed:
    """Check a configuration like `check`, and load its initial weights."""
    with add_key_positions(loaded):
        loaded, first = load_first_weights(loaded)
    return Placed(check(loaded, processes, training=training), first)


def prepare(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> PreparedRun:
    """Open and check everything that a configuration specifies. This doesn't need a process group."""
    return place(loaded, processes, training=training).open(training=training)


def open_recipe(loaded: Loaded, first: InitialWeights | None, *, training: bool = True) -> Setup:
    """Open and check the parts of a recipe that don't depend on the placement."""
    ready = setup(loaded.config.recipe, first)
    check_first(ready)
    check_kernels(loaded.config.placement, ready, training=training)
    return ready


def open_unplaced(loaded: Loaded) -> Setup:
    """Open and check a recipe with its initial weights, regardless of the placement."""
    with add_key_positions(loaded):
        return open_recipe(*load_first_weights(loaded))
