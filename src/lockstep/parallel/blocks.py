"""The blocks of a model."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

_CONTAINERS: Final[Any] = (nn.Sequential, nn.ModuleList)


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks, in its order: what is gathered, freed or computed again as one.

    They are what stands in its plain nn.Sequential and nn.ModuleList containers, however deep these lie in each other,
    since a container's own parts are called as modules. A block that shares a parameter with the rest is none.
    """
    found = [module for child in model.children() for module in _blocks(child, listed=type(model) in _CONTAINERS)]
    owners: dict[int, set[int]] = {}
    inside = {id(part): number for number, unit in enumerate(found) for part in unit.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(inside.get(id(module), -1))
    shared = {number for units in owners.values() if len(units) > 1 for number in units}
    return [unit for number, unit in enumerate(found) if number not in shared]


def _blocks(module: nn.Module, listed: bool) -> list[nn.Module]:
    if type(module) in _CONTAINERS:
        return [block for child in module.children() for block in _blocks(child, listed=True)]
    if listed and any(True for _ in module.parameters()):
        return [module]
    return [] if listed else [block for child in module.children() for block in _blocks(child, listed=False)]
