"""The full configuration, with the sections recipe, placement and run."""

from lockstep.config.base import Section
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.run import RunConfig


class Config(Section):
    """A recipe, the placement that it runs on, and the outputs of the run."""

    recipe: Recipe
    placement: Placement = Placement()
    run: RunConfig = RunConfig()
