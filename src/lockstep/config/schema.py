"""The full configuration, with the sections recipe, placement and run."""

from lockstep.config.base import Section
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.run import RunConfig


class Config(Section):
    """A configuration, which runs a recipe on a placement."""

    recipe: Recipe
    placement: Placement = Placement()
    run: RunConfig = RunConfig()
