"""What the layers of a model are, for learning rates that fall from each to the one before it.

Clark et al. 2020, "ELECTRA", section 3.1, and Bao et al. 2021, "BEiT", have the idea; of models that say what their
layers are, timm's own function decides.
"""

from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from typing import Any, Final

from torch import nn

from lockstep.errors import UsageError

_CONTAINERS: Final[Any] = (nn.Sequential, nn.ModuleList)


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return for each trained parameter `decay` to the number of layers behind its own: 1 for the last layer.

    A model of timm's knows its layers (`group_matcher`). Of any other a layer is a block, that is what stands in a
    plain nn.Sequential or nn.ModuleList, and each run of parameters before, between and after the blocks; a run without
    a parameter of two dims, such as a norm, goes with the layer before it. Raises UsageError where all is one layer.
    """
    scales = _of_timm(model, decay) if callable(getattr(model, "group_matcher", None)) else _of_blocks(model, decay)
    if len(set(scales.values())) == 1 and decay < 1:
        raise UsageError(
            "recipe.optimizer.layer_decay: all that is trained lies in one layer of this model; leave it out, "
            "or give rates by name in recipe.optimizer.groups"
        )
    return scales


def _of_timm(model: nn.Module, decay: float) -> dict[str, float]:
    optim: Any = import_module("timm.optim")  # here, because it takes seconds
    groups = optim.param_groups_layer_decay(model, layer_decay=decay)
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    return {name: scale[id(each)] for name, each in model.named_parameters() if each.requires_grad}


def _of_blocks(model: nn.Module, decay: float) -> dict[str, float]:
    parameters = dict(model.named_parameters())
    number = 0
    layers: dict[str, int] = {}
    blocks = list(_blocks(model, ""))
    for _, run in groupby(parameters, lambda name: next((path for path in blocks if name.startswith(path)), "")):
        names = list(run)
        number += bool(layers) and any(parameters[name].ndim > 1 for name in names)
        layers |= dict.fromkeys(names, number)
    return {name: decay ** (number - layer) for name, layer in layers.items() if parameters[name].requires_grad}


def _blocks(module: nn.Module, path: str) -> Iterator[str]:
    """Yield where the blocks begin: `layers.0.`, `layers.1.`; what is within a block is no block of its own."""
    for name, child in module.named_children():
        inner = f"{path}{name}."
        if type(module) in _CONTAINERS and type(child) not in _CONTAINERS:
            yield inner
        else:
            yield from _blocks(child, inner)
