"""Tensors that lie in rows on the ranks, made whole again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.core.shard import Held, Shard
from lockstep.runtime.world import World


def gathered(world: World, tensors: Mapping[str, Held]) -> dict[str, Tensor]:
    """Return all tensors whole, on every rank; those that are cut come to the CPU. All ranks call it alike.

    For models that fit: what a checkpoint needs goes to the disk without it (training/checkpoint.py).
    """
    return {name: _gathered(world, held) for name, held in tensors.items()}


def _gathered(world: World, held: Held) -> Tensor:
    if not isinstance(held, Shard):
        return held.detach()
    # Bytes, since each is on one rank and zero on the others: a float's sum would turn -0.0 into 0.0.
    size = held.tensor.element_size()
    row = held.shape[1:].numel() * size
    table = torch.zeros(held.shape.numel() * size, dtype=torch.uint8)
    if held.primary and held.tensor.numel():
        first = held.first * row
        own = held.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        table[first : first + len(own)] = own
    return world.add_(table).view(held.tensor.dtype).reshape(held.shape)
