"""Divides the parameters of a model into layers, for layer-wise learning rate decay.

The method is from Clark et al. 2020, "ELECTRA", section 3.1, and Bao et al. 2021, "BEiT". For models that define their
layers in the same way as timm models, timm's implementation is used.
"""

from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from typing import Any, Final

from torch import nn

from lockstep.errors import UsageError

_CONTAINERS: Final[Any] = (nn.Sequential, nn.ModuleList)


def compute_layer_lr_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the learning rate factor of each trained parameter by name.

    The factor of the last layer is 1, and the factor of each earlier layer is `decay` times that of the next layer.
    timm models define their layers with `group_matcher`. In all other models, a layer is one of:

    - a block, which is a child of an nn.Sequential or nn.ModuleList, but isn't such a container itself
    - a group of consecutive parameters before, between or after the blocks

    If all parameters of a block or group have fewer than two dims, as in a norm layer, it belongs to the previous
    layer. Raises UsageError if all trained parameters are in a single layer.
    """
    scales = (
        _compute_timm_lr_scales(model, decay)
        if callable(getattr(model, "group_matcher", None))
        else _compute_block_lr_scales(model, decay)
    )
    if len(set(scales.values())) == 1 and decay < 1:
        raise UsageError(
            "recipe.optimizer.layer_decay: all trainable parameters are in a single layer of the model; remove the "
            "key, or set learning rates by name in recipe.optimizer.groups"
        )
    return scales


def _compute_timm_lr_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    optim: Any = import_module("timm.optim")  # imported lazily, because the import takes seconds
    groups = optim.param_groups_layer_decay(model, layer_decay=layer_decay)
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    return {name: scale[id(parameter)] for name, parameter in model.named_parameters() if parameter.requires_grad}


def _compute_block_lr_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    parameters = dict(model.named_parameters())
    number = 0
    layers: dict[str, int] = {}
    blocks = list(_find_block_prefixes(model, ""))
    for _, group in groupby(parameters, lambda name: next((path for path in blocks if name.startswith(path)), "")):
        names = list(group)
        number += bool(layers) and any(parameters[name].ndim > 1 for name in names)
        layers |= dict.fromkeys(names, number)
    return {name: layer_decay ** (number - layer) for name, layer in layers.items() if parameters[name].requires_grad}


def _find_block_prefixes(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the name prefix of each block, such as `layers.0.` and `layers.1.`, except for nested blocks."""
    for name, child in module.named_children():
        prefix = f"{path}{name}."
        if type(module) in _CONTAINERS and type(child) not in _CONTAINERS:
            yield prefix
        else:
            yield from _find_block_prefixes(child, prefix)
