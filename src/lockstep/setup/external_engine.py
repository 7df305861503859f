"""The configuration files of another framework's engine, such as DeepSpeed's JSON, made from a recipe."""

import json

from lockstep.config.load import Loaded
from lockstep.parallel.numerics import Numerics
from lockstep.setup.build import numerics_of
from lockstep.setup.resolved import Resolved
from lockstep.setup.strategy import find_strategy, recompute_interval
from lockstep.strategies.base import ExternalEngine


def numerics_for(resolved: Resolved) -> Numerics:
    """Return the compute configuration of a placement's engine."""
    placement = resolved.placement
    return numerics_of(resolved.recipe, placement.offload_activations, recompute_interval(placement, resolved.strategy))


def engine_files(resolved: Resolved) -> dict[str, str]:
    """Return the framework's configuration files, by name; none for an engine of our own."""
    strategy = resolved.strategy
    files = strategy.files(numerics_for(resolved)) if isinstance(strategy, ExternalEngine) else {}
    return {name: json.dumps(content, indent=1) + "\n" for name, content in files.items()}


def engine_files_of(loaded: Loaded) -> dict[str, str]:
    """Return the same for a configuration; the number of processes makes no difference."""
    name, strategy = find_strategy(loaded.config.placement, 1)
    return engine_files(Resolved(loaded, 1, name, strategy))
