"""Activation recomputation: a block keeps its inputs only, and does its forward again when its backward needs the rest.

Chen et al. 2016, "Training deep nets with sublinear memory cost". Random numbers are drawn again from where the block
found the generators, so it is the same forward, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.blocks import find_units


def recompute(model: nn.Module, every: int) -> nn.Module:
    """Let each `every`-th block of the model (parallel/blocks.py) recompute its activations, from the last one back.

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
