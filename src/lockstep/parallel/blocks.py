"""The blocks of a model, and activation recomputation by block: it keeps its inputs only, and does its forward again
when its backward needs the rest.

Chen et al. 2016, "Training deep nets with sublinear memory cost". Random numbers are drawn again from where the block
found the generators, so it is the same forward, to the bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import nn
from torch.utils.checkpoint import checkpoint

_CONTAINERS: Final[Any] = (nn.Sequential, nn.ModuleList)


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks, in its order: what is gathered, freed or computed again as one.

    They are what stands in its plain nn.Sequential and nn.ModuleList containers, however deep these lie in each other,
    since a container's own parts are called as modules. A block that shares a parameter with the rest is none, nor is a
    part of another block, which a second name of that one leads to.
    """
    named = [module for child in model.children() for module in _blocks(child, listed=type(model) in _CONTAINERS)]
    within = {part for block in named for part in block.modules() if part is not block}
    found = [block for block in dict.fromkeys(named) if block not in within]
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


def recompute(model: nn.Module, every: int) -> nn.Module:
    """Let each `every`-th block of the model recompute its activations, from the last one back.

    A model without blocks does so as a whole. Returns the model, whose names stay as they are.
    """
    units = find_units(model) or [model]
    for unit in units[::-1][::every]:
        # On the instance: whatever is called around a forward stays.
        unit.forward = partial(_recompute, unit.forward)
    return model


def _recompute(forward: Callable[..., Any], /, *inputs: Any, **named: Any) -> Any:
    """Call a block's forward by way of checkpoint, whose own keywords a block may have too: `debug`, `function`."""
    return checkpoint(partial(forward, **named), *inputs, use_reentrant=False)
