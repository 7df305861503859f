"""Finds the blocks of a model, and recomputes activations block by block.

A recomputed block only saves its inputs, and repeats its forward pass when the backward pass needs its activations
(Chen et al. 2016, "Training deep nets with sublinear memory cost"). The second forward pass starts with the same RNG
states as the first, so its results have the same bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import nn
from torch.utils.checkpoint import checkpoint

_CONTAINERS: Final[Any] = (nn.Sequential, nn.ModuleList)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the model in order. Each block is gathered, freed and recomputed as a unit.

    Blocks are the items of plain nn.Sequential and nn.ModuleList containers at any nesting depth, because models call
    the items of these containers as modules. An item isn't a block if it shares a parameter with the rest of the model,
    or if it is nested in a block.
    """
    candidates = [
        module
        for child in model.children()
        for module in _collect_blocks(child, is_list_item=type(model) in _CONTAINERS)
    ]
    nested = {part for block in candidates for part in block.modules() if part is not block}
    outermost = [block for block in dict.fromkeys(candidates) if block not in nested]
    users: dict[int, set[int]] = {}  # by parameter: the blocks that use it; -1 is the rest
    block_of = {id(part): number for number, block in enumerate(outermost) for part in block.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(block_of.get(id(module), -1))
    sharing = {number for numbers in users.values() if len(numbers) > 1 for number in numbers}
    return [block for number, block in enumerate(outermost) if number not in sharing]


def _collect_blocks(module: nn.Module, is_list_item: bool) -> list[nn.Module]:
    if type(module) in _CONTAINERS:
        return [block for child in module.children() for block in _collect_blocks(child, is_list_item=True)]
    if is_list_item and any(True for _ in module.parameters()):
        return [module]
    return (
        []
        if is_list_item
        else [block for child in module.children() for block in _collect_blocks(child, is_list_item=False)]
    )


def enable_recomputation(model: nn.Module, interval: int) -> nn.Module:
    """Make every `interval`-th block recompute its activations, counting backwards from the last block.

    If the model has no blocks, all of its activations are recomputed. Changes the model in place and returns it. Module
    names don't change.
    """
    units = find_blocks(model) or [model]
    for unit in units[::-1][::interval]:
        # Replace the forward method of the instance, so that module hooks still run outside the checkpoint.
        unit.forward = partial(_recompute, unit.forward)
    return model


def _recompute(forward: Callable[..., Any], /, *inputs: Any, **named: Any) -> Any:
    """Call a block's forward method through torch.utils.checkpoint.

    The keyword arguments are bound with partial, because checkpoint has parameters that a block may have too, such as
    `debug` and `function`.
    """
    return checkpoint(partial(forward, **named), *inputs, use_reentrant=False)
