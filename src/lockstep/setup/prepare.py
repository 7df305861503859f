"""Prepares a recipe: opens and checks the data, model and optimizer of a configuration.

Every command that computes with a recipe uses this module, so all of them reject the same mistakes.
"""

from dataclasses import dataclass
from typing import final

from lockstep.common.user_source import source_digests
from lockstep.config.blame import with_places
from lockstep.config.load import Loaded
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.run import RunConfig
from lockstep.setup.build import Setup, setup
from lockstep.setup.checks import check_cut, check_kernels, check_placement
from lockstep.setup.first_weights import FirstWeights, load_first_weights
from lockstep.setup.resolved import Resolved, resolve
from lockstep.setup.resume import check_first
from lockstep.strategies.base import Strategy


@final
@dataclass(frozen=True)
class Prepared:
    """A recipe on a placement, with data, model and optimizer opened and checked against the placement."""

    resolved: Resolved
    ready: Setup

    @property
    def loaded(self) -> Loaded:
        """The configuration, with the hash of its first weights."""
        return self.resolved.loaded

    @property
    def recipe(self) -> Recipe:
        """The recipe, which decides the weights."""
        return self.resolved.recipe

    @property
    def placement(self) -> Placement:
        """The placement: where and how fast the recipe is trained."""
        return self.resolved.placement

    @property
    def run(self) -> RunConfig:
        """The run section: what is saved."""
        return self.resolved.run

    @property
    def strategy(self) -> Strategy:
        """The strategy: how the processes share the work."""
        return self.resolved.strategy

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.resolved.processes

    @property
    def sources(self) -> dict[str, str]:
        """The hashes of the user's source files that the recipe names, and of those of a user's strategy.

        A checkpoint keeps only those of the recipe, because the strategy can change when a run resumes.
        """
        name = self.resolved.strategy_name
        return {**self.ready.source, **source_digests([name] if ":" in name else [])}


@final
@dataclass(frozen=True)
class Placed:
    """A configuration that its placement can run, and its first weights. No data is opened yet."""

    resolved: Resolved
    first: FirstWeights | None = None

    def open(self, *, training: bool = True) -> Prepared:
        """Open data, model and optimizer, and check them against the placement. Raise UsageError if they don't fit."""
        with with_places(self.resolved.loaded):
            ready = open_recipe(self.resolved.loaded, self.first, training=training)
            check_cut(self.resolved, ready)
        return Prepared(self.resolved, ready)


def check(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> Resolved:
    """Resolve a configuration for `processes` processes, by default for the number that it requests on this machine.

    Raises UsageError for everything that the configuration alone shows to be impossible. An evaluation, with
    `training=False`, can use more processes than a step has micro-batches, because it doesn't share steps.
    """
    with with_places(loaded):
        resolved = resolve(loaded, processes)
        check_placement(resolved, training=training)
    return resolved


def place(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> Placed:
    """Check a configuration like `check`, and read its first weights."""
    with with_places(loaded):
        loaded, first = load_first_weights(loaded)
    return Placed(check(loaded, processes, training=training), first)


def prepare(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> Prepared:
    """Open and check everything that a configuration names. It neither needs nor opens a process group."""
    return place(loaded, processes, training=training).open(training=training)


def open_recipe(loaded: Loaded, first: FirstWeights | None, *, training: bool = True) -> Setup:
    """Open and check everything that all placements of a recipe have in common."""
    ready = setup(loaded.config.recipe, first)
    check_first(ready)
    check_kernels(loaded.config.placement, ready, training=training)
    return ready


def open_unplaced(loaded: Loaded) -> Setup:
    """Open and check a recipe with the first weights of its configuration, regardless of the placement."""
    with with_places(loaded):
        return open_recipe(*load_first_weights(loaded))
