"""The whole configuration: a recipe on a placement, and what is kept of the run."""

from lockstep.config.base import Section
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.run import RunConfig


class Config(Section):
    """A run is a recipe on a placement."""

    recipe: Recipe
    placement: Placement = Placement()
    run: RunConfig = RunConfig()
