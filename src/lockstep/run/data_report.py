"""What `lockstep doctor data` finds: the samples of a recipe's data that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from lockstep.common.platforms import usable_cores
from lockstep.config.recipe import Recipe
from lockstep.data.loader import damages
from lockstep.run.build import open_recipe_data


def read_all(recipe: Recipe, damage: Callable[[str], None], progress: Callable[[str], None]) -> tuple[int, int]:
    """Read both parts on all cores; return how many samples cannot be read, and how many there are.

    `damage` gets a line for each that cannot be read, and `progress` one for each tenth of them all.
    """
    strict = recipe.data.model_copy(update={"on_error": "raise"})
    data = open_recipe_data(recipe.model_copy(update={"data": strict}))
    parts = [split for split in (data.train, data.validation) if split is not None]
    total, workers = sum(map(len, parts)), usable_cores()
    damaged, reported = 0, 0
    for number, found in enumerate(chain(*(damages(split, workers) for split in parts)), 1):
        if found:
            damaged += 1
            damage(found)
        if number * 10 // total > reported:
            reported = number * 10 // total
            progress(f"{number:,} of {total:,} samples read")
    return damaged, total
