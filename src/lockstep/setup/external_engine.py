"""The configuration files of another framework's engine, such as DeepSpeed's JSON, made from a recipe."""

import json

from lockstep.config.load import Loaded
from lockstep.setup.resolved import Resolved
from lockstep.setup.strategy import find_strategy
from lockstep.strategies.base import ExternalEngine


def engine_files(resolved: Resolved) -> dict[str, str]:
    """Return the framework's configuration files, by name; none for an engine of our own."""
    strategy = resolved.strategy
    files = strategy.files(resolved.numerics) if isinstance(strategy, ExternalEngine) else {}
    return {name: json.dumps(content, indent=1) + "\n" for name, content in files.items()}


def engine_files_of(loaded: Loaded) -> dict[str, str]:
    """Return the same for a configuration; the number of processes makes no difference."""
    name, strategy = find_strategy(loaded.config.placement, 1)
    return engine_files(Resolved(loaded, 1, name, strategy))
