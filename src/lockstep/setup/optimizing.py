"""The optimizer that a recipe asks for, with what it says of single parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.config import plan as planning
from lockstep.config import recipe as config
from lockstep.config.recipe import Recipe
from lockstep.core.rate import scale_rate
from lockstep.device.meta import on_meta
from lockstep.models.layers import layer_scales
from lockstep.parallel.groups import GroupSettings, distinct, settings
from lockstep.parallel.optimize import Settings, make_optimizer


def optimizer(recipe: Recipe, settings_of: Settings | None = None) -> Callable[..., Optimizer]:
    """Return what makes the optimizer of named parameters; `settings_of` gives what single ones are given otherwise."""
    chosen = recipe.optimizer
    return partial(
        make_optimizer,
        name=chosen.name,
        lr=planning.base_rate(recipe),
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        weight_decay=chosen.weight_decay,
        decay_bias_and_norm=chosen.decay_bias_and_norm,
        options=chosen.options,
        settings=settings_of,
    )


def special_settings(recipe: Recipe, names: Sequence[str], blank: Callable[[], nn.Module]) -> dict[str, dict[str, Any]]:
    """Return what the optimizer does otherwise to single parameters of `names`, all that are trained, by name.

    `blank` builds the model, whose layers decide where rates decay from layer to layer.
    """
    decay = recipe.optimizer.layer_decay
    scales = {} if decay is None else layer_scales(on_meta(blank), decay)
    return settings(names, [_group(recipe, group) for group in recipe.optimizer.groups], scales)


def with_each(recipe: Recipe, special: Mapping[str, dict[str, Any]]) -> list[Callable[..., Optimizer]]:
    """Return what makes the optimizer as it is for each of the settings, whatever a parameter is called."""
    return [optimizer(recipe), *(optimizer(recipe, partial(_always, each)) for each in distinct(special))]


def _always(setting: dict[str, Any], _: str) -> dict[str, Any]:
    return setting


def _group(recipe: Recipe, given: config.ParameterGroupConfig) -> GroupSettings:
    factor = given.lr_factor or 1.0
    if given.lr is not None:
        factor = scale_rate(given.lr.value, given.lr.per_samples, recipe.batch) / planning.base_rate(recipe)
    decay = {} if given.weight_decay is None else {"weight_decay": given.weight_decay}
    return GroupSettings(given.match, factor, {**given.options, **decay})
