"""Resolves a configuration for a number of processes, which determines derived values such as the strategy."""

import json
from dataclasses import dataclass

import torch

from lockstep.common.platforms import count_usable_cores
from lockstep.common.text import format_count
from lockstep.config.load import LoadedConfig
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.run import RunConfig
from lockstep.config.schema import Config
from lockstep.core.devices import SHARING, check_cuda
from lockstep.errors import UsageError
from lockstep.parallel.numerics import Numerics
from lockstep.setup.strategy import find_strategy, get_recompute_interval
from lockstep.strategies import SINGLE_PROCESS_STRATEGIES
from lockstep.strategies.base import ExternalEngineStrategy, Strategy


@dataclass(frozen=True)
class ResolvedConfig:
    """A valid configuration, with its number of processes and its strategy."""

    loaded: LoadedConfig
    processes: int
    strategy_name: str
    strategy: Strategy

    @property
    def recipe(self) -> Recipe:
        """The recipe section, which determines the weights."""
        return self.loaded.config.recipe

    @property
    def placement(self) -> Placement:
        """The placement section, which determines where and how the model is trained, but not its weights."""
        return self.loaded.config.placement

    @property
    def run(self) -> RunConfig:
        """The run section, which determines what is saved."""
        return self.loaded.config.run

    @property
    def numerics(self) -> Numerics:
        """The numerical settings of the engine."""
        interval = get_recompute_interval(self.placement, self.strategy)
        return Numerics(self.recipe, self.placement.offload_activations, interval)

    @property
    def engine_files(self) -> dict[str, str]:
        """The configuration files of an external engine by name, such as DeepSpeed's JSON."""
        files = (
            self.strategy.make_config_files(self.numerics) if isinstance(self.strategy, ExternalEngineStrategy) else {}
        )
        return {name: json.dumps(content, indent=1) + "\n" for name, content in files.items()}


def resolve_config(loaded: LoadedConfig, processes: int | None = None) -> ResolvedConfig:
    """Resolve a configuration for `processes` processes, by default as many as it requests on this machine.

    Raises UsageError if there are more processes than devices, or if the strategy can't be created.
    """
    process_count = count_local_processes(loaded.config) if processes is None else processes
    name, strategy = find_strategy(loaded.config.placement, process_count)
    return ResolvedConfig(loaded, process_count, name, strategy)


def explain_process_count(loaded: LoadedConfig) -> str:
    """Return a note if only one of several devices is used because a step has only one micro-batch by default.

    Otherwise, return an empty string.
    """
    recipe, placement = loaded.config.recipe, loaded.config.placement
    chosen = placement.processes != "auto" or placement.strategy.name in SINGLE_PROCESS_STRATEGIES
    if chosen or recipe.microbatches > 1 or loaded.origins.get("recipe.microbatches", "default") != "default":
        return ""
    gpus = 0 if placement.device == "cpu" else torch.cuda.device_count()
    devices = gpus or count_usable_cores() // recipe.threads
    max_processes = min(devices, recipe.batch)
    if max_processes < 2:
        return ""
    available = f"{gpus} GPUs" if gpus else f"{count_usable_cores()} CPU cores"
    return (
        f"note: 1 process for {available}, because a step of {recipe.batch} samples is 1 micro-batch; to use "
        f"{max_processes} processes, set recipe.microbatches={max_processes}, which changes the bits"
    )


def count_local_processes(config: Config) -> int:
    """Return the number of processes that a configuration requests on this machine.

    With `processes: auto`, this is the number of GPUs or, without GPUs, as many as the cores support, but at most the
    number of micro-batches. Raises UsageError if there are more processes than GPUs, unless the backend is gloo.
    """
    placement = config.placement
    gpus = 0 if placement.device == "cpu" else torch.cuda.device_count()
    check_cuda(placement.device, gpus)
    if placement.processes == "auto":
        if placement.strategy.name in SINGLE_PROCESS_STRATEGIES:
            return 1
        cores = count_usable_cores() // config.recipe.threads
        return max(1, min(gpus or cores, config.recipe.microbatches))
    if gpus and placement.processes > gpus and placement.backend != "gloo":
        raise UsageError(
            f"placement.processes: {placement.processes} processes but only {format_count(gpus, 'CUDA device')}; "
            f"use at most {gpus}, or placement.device=cpu, or {SHARING}"
        )
    return placement.processes
