"""Creates the optimizer of a recipe, with the recipe's settings for individual parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.config import plan as planning
from lockstep.config import recipe as config
from lockstep.config.recipe import Recipe
from lockstep.core.rate import scale_rate
from lockstep.device.meta import build_on_meta
from lockstep.models.layers import compute_layer_lr_scales
from lockstep.parallel.groups import GroupSettings, compute_parameter_options, find_distinct_options
from lockstep.parallel.optimize import GetParameterOptions, make_optimizer


def make_optimizer_factory(recipe: Recipe, get_settings: GetParameterOptions | None = None) -> Callable[..., Optimizer]:
    """Return a function that creates the optimizer from named parameters.

    `get_settings` takes the name of a parameter, and returns those settings that differ from the general settings.
    """
    optimizer = recipe.optimizer
    return partial(
        make_optimizer,
        name=optimizer.name,
        lr=planning.compute_base_rate(recipe),
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov,
        weight_decay=optimizer.weight_decay,
        decay_bias_and_norm=optimizer.decay_bias_and_norm,
        options=optimizer.options,
        settings=get_settings,
    )


def compute_parameter_settings(
    recipe: Recipe, names: Sequence[str], build_blank: Callable[[], nn.Module]
) -> dict[str, dict[str, Any]]:
    """Return the optimizer settings that differ from the recipe's general settings, by parameter name.

    `names` are the names of all trained parameters. `build_blank` builds the model, whose layers determine the
    layer-wise learning rate decay.
    """
    decay = recipe.optimizer.layer_decay
    scales = {} if decay is None else compute_layer_lr_scales(build_on_meta(build_blank), decay)
    return compute_parameter_options(
        names, [_make_group_settings(recipe, group) for group in recipe.optimizer.groups], scales
    )


def make_optimizer_factories(
    recipe: Recipe, parameter_settings: Mapping[str, dict[str, Any]]
) -> list[Callable[..., Optimizer]]:
    """Return functions that create the optimizer: one for the general settings, and one for each set of other settings.

    Each function applies its settings to all parameters, regardless of their names.
    """
    return [
        make_optimizer_factory(recipe),
        *(
            make_optimizer_factory(recipe, partial(_get_constant_settings, settings))
            for settings in find_distinct_options(parameter_settings)
        ),
    ]


def _get_constant_settings(settings: dict[str, Any], _: str) -> dict[str, Any]:
    return settings


def _make_group_settings(recipe: Recipe, config_group: config.ParameterGroupConfig) -> GroupSettings:
    factor = config_group.lr_factor or 1.0
    if config_group.lr is not None:
        factor = scale_rate(
            config_group.lr.value, config_group.lr.per_samples, recipe.batch
        ) / planning.compute_base_rate(recipe)
    decay = {} if config_group.weight_decay is None else {"weight_decay": config_group.weight_decay}
    return GroupSettings(config_group.match, factor, {**config_group.options, **decay})
