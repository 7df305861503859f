"""What a strategy hands to another framework's engine, as files that show it: DeepSpeed's JSON, made from a recipe."""

from __future__ import annotations

import json

from lockstep.config.load import Loaded
from lockstep.parallel.numerics import Numerics
from lockstep.run.build import numerics_of
from lockstep.run.resolved import Resolved
from lockstep.run.strategy import find_strategy, recomputed
from lockstep.strategies.base import Foreign


def placed_numerics(resolved: Resolved) -> Numerics:
    """Return what the engine of a placement computes by."""
    placement = resolved.placement
    return numerics_of(resolved.recipe, placement.offload_activations, recomputed(placement, resolved.strategy))


def handed_over(resolved: Resolved) -> dict[str, str]:
    """Return the text of each file that shows what the framework is given; none where there is no other framework."""
    strategy = resolved.strategy
    files = strategy.files(placed_numerics(resolved)) if isinstance(strategy, Foreign) else {}
    return {name: json.dumps(content, indent=1) + "\n" for name, content in files.items()}


def handed_over_by(loaded: Loaded) -> dict[str, str]:
    """Return the same of a configuration; on how many processes makes no difference."""
    name, strategy = find_strategy(loaded.config.placement, 1)
    return handed_over(Resolved(loaded, 1, name, strategy))
