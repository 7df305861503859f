"""The preparation of a recipe: from a configuration to data, model and optimizer that are opened and checked.

Every command that computes with a recipe comes through here, so all of them refuse the same things.
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
from lockstep.setup.first_weights import First, load_first_weights
from lockstep.setup.resolved import Resolved, resolve
from lockstep.setup.resume import check_first
from lockstep.strategies.base import Strategy


@final
@dataclass(frozen=True)
class Prepared:
    """A recipe on a placement: its data, model and optimizer are opened, and fit the placement."""

    resolved: Resolved
    ready: Setup

    @property
    def loaded(self) -> Loaded:
        """The configuration, with the digest of its first weights."""
        return self.resolved.loaded

    @property
    def recipe(self) -> Recipe:
        """What is computed."""
        return self.resolved.recipe

    @property
    def placement(self) -> Placement:
        """Where and how fast."""
        return self.resolved.placement

    @property
    def run(self) -> RunConfig:
        """What is kept."""
        return self.resolved.run

    @property
    def strategy(self) -> Strategy:
        """How the processes share the work."""
        return self.resolved.strategy

    @property
    def processes(self) -> int:
        """How many share it."""
        return self.resolved.processes

    @property
    def sources(self) -> dict[str, str]:
        """The hashes of the user's own source files: those that the recipe names, and those of a strategy of their own.

        A checkpoint has only those of the recipe: the strategy may be another one after a resume.
        """
        name = self.resolved.strategy_name
        return {**self.ready.source, **source_digests([name] if ":" in name else [])}


@final
@dataclass(frozen=True)
class Placed:
    """A configuration that its placement can run, and the first weights that it names; no data is opened yet."""

    resolved: Resolved
    first: First | None = None

    def open(self, *, training: bool = True) -> Prepared:
        """Open data, model and optimizer, and check them with the placement; what does not fit raises UsageError."""
        with with_places(self.resolved.loaded):
            ready = open_recipe(self.resolved.loaded, self.first, training=training)
            check_cut(self.resolved, ready)
        return Prepared(self.resolved, ready)


def check(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> Resolved:
    """Return what a configuration means on so many processes; left out, as many as it asks for on this machine.

    What the configuration alone shows to be impossible raises UsageError. An evaluation, without `training`, shares no
    steps, so it may have more processes than a step has micro-batches.
    """
    with with_places(loaded):
        resolved = resolve(loaded, processes)
        check_placement(resolved, training=training)
    return resolved


def place(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> Placed:
    """Check a configuration as `check` does, and read the first weights that it names."""
    with with_places(loaded):
        loaded, first = load_first_weights(loaded)
    return Placed(check(loaded, processes, training=training), first)


def prepare(loaded: Loaded, processes: int | None = None, *, training: bool = True) -> Prepared:
    """Open and check everything that a configuration names. No process group is needed, and none is opened."""
    return place(loaded, processes, training=training).open(training=training)


def open_recipe(loaded: Loaded, first: First | None, *, training: bool = True) -> Setup:
    """Open and check what all placements of a recipe have in common."""
    ready = setup(loaded.config.recipe, first)
    check_first(ready)
    check_kernels(loaded.config.placement, ready, training=training)
    return ready


def open_unplaced(loaded: Loaded) -> Setup:
    """Do the same with the first weights that a configuration names, whatever its placement."""
    with with_places(loaded):
        return open_recipe(*load_first_weights(loaded))
