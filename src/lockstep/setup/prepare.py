"""Prepares a recipe: opens its dataset, and checks its model and optimizer.

Every command that runs a recipe uses this module, so that all commands reject the same mistakes.
"""

from dataclasses import dataclass
from typing import final

from lockstep.common.user_source import hash_sources
from lockstep.config.load import LoadedConfig
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.run import RunConfig
from lockstep.setup.build import Setup, build_setup
from lockstep.setup.checks import check_kernels, check_partitioning, check_placement
from lockstep.setup.initial_weights import InitialWeights, load_initial_weights
from lockstep.setup.resolved import ResolvedConfig, resolve_config
from lockstep.setup.resume import check_initial_weights
from lockstep.setup.wrong_names import explain_errors
from lockstep.strategies.base import Strategy


@final
@dataclass(frozen=True)
class PreparedRun:
    """A recipe and its placement. The dataset is open, and the model and the optimizer have been checked."""

    resolved: ResolvedConfig
    setup: Setup

    @property
    def loaded(self) -> LoadedConfig:
        """The configuration, with the hash of its initial weights."""
        return self.resolved.loaded

    @property
    def recipe(self) -> Recipe:
        """The recipe section, which determines the weights."""
        return self.resolved.recipe

    @property
    def placement(self) -> Placement:
        """The placement section, which determines where and how the model is trained, but not its weights."""
        return self.resolved.placement

    @property
    def run(self) -> RunConfig:
        """The run section, which determines what is saved."""
        return self.resolved.run

    @property
    def strategy(self) -> Strategy:
        """The strategy, which determines how the work is distributed over the processes."""
        return self.resolved.strategy

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.resolved.processes

    @property
    def source_hashes(self) -> dict[str, str]:
        """The hashes of the user's source files that the recipe and the strategy import.

        Checkpoints only store the hashes of the recipe's source files, because a run can resume with a different
        strategy.
        """
        name = self.resolved.strategy_name
        return {**self.setup.source_hashes, **hash_sources([name] if ":" in name else [])}


@final
@dataclass(frozen=True)
class PreparedConfig:
    """A configuration whose placement has been checked, and its initial weights. The dataset isn't open yet."""

    resolved: ResolvedConfig
    initial_weights: InitialWeights | None = None

    def open(self, *, training: bool = True) -> PreparedRun:
        """Open the dataset, and check the model and the optimizer.

        Raises UsageError if the recipe contains a mistake or the placement doesn't support it.
        """
        with explain_errors(self.resolved.loaded):
            setup = open_recipe(self.resolved.loaded, self.initial_weights, training=training)
            check_partitioning(self.resolved, setup)
        return PreparedRun(self.resolved, setup)


def check_config(loaded: LoadedConfig, processes: int | None = None, *, training: bool = True) -> ResolvedConfig:
    """Resolve a configuration for a number of processes, and check its placement.

    `processes` defaults to the number that the configuration requests on this machine. If `training` is False, the
    placement is checked for an evaluation, which can use more processes than a step has micro-batches. Raises
    UsageError if the placement doesn't support the recipe.
    """
    with explain_errors(loaded):
        resolved = resolve_config(loaded, processes)
        check_placement(resolved, training=training)
    return resolved


def prepare_config(loaded: LoadedConfig, processes: int | None = None, *, training: bool = True) -> PreparedConfig:
    """Load the initial weights of a configuration, and check the configuration as `check_config` does."""
    with explain_errors(loaded):
        loaded, initial_weights = load_initial_weights(loaded)
    return PreparedConfig(check_config(loaded, processes, training=training), initial_weights)


def prepare_run(loaded: LoadedConfig, processes: int | None = None, *, training: bool = True) -> PreparedRun:
    """Check a configuration, load its initial weights, and open its dataset. No process group is needed."""
    return prepare_config(loaded, processes, training=training).open(training=training)


def open_recipe(loaded: LoadedConfig, initial_weights: InitialWeights | None, *, training: bool = True) -> Setup:
    """Open the dataset of a recipe, check its model, kernels and optimizer, and return the setup.

    The strategy and the number of processes aren't checked.
    """
    setup = build_setup(loaded.config.recipe, initial_weights)
    check_initial_weights(setup)
    check_kernels(loaded.config.placement, setup, training=training)
    return setup


def open_recipe_without_placement(loaded: LoadedConfig) -> Setup:
    """Load the initial weights of a recipe and call `open_recipe`, without checking the strategy."""
    with explain_errors(loaded):
        return open_recipe(*load_initial_weights(loaded))
