"""Where DeepSpeed keeps a parameter, and what the optimizer keeps for it: a piece of a flat tensor on each rank.

It puts the parameters of a group one after the other in a flat tensor, fills it up, and cuts it evenly over the ranks
(stages 1 and 2); or it cuts each parameter so, and puts the pieces one after the other (stage 3). The optimizer moves
these flat tensors, of fp32, and so its state is as flat. All that this project reads of DeepSpeed's own layout is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.shard import Shard, piece


@dataclass(frozen=True, eq=False)
class FlatPiece:
    """Where this rank's piece of a parameter of `shape` is: `length` elements of a flat tensor from `at` on.

    It has the parameter's elements from `first` on. The optimizer has `flat` in its parameter group number `group`.
    """

    group: int
    flat: Tensor
    at: int
    first: int
    length: int
    shape: torch.Size

    def piece_of(self, flat: Tensor) -> Shard:
        """Return this rank's piece of `flat`, which is as flat as the parameters are."""
        own = flat.detach()[self.at : self.at + self.length]
        return piece(own, self.first if self.length else 0, self.shape)


def flat_pieces(optimizer: Any, rank: int, stage: int) -> dict[nn.Parameter, FlatPiece]:
    """Return the place of each parameter that DeepSpeed's `optimizer` moves."""
    found = _of_parameters(optimizer, rank) if stage == 3 else _of_groups(optimizer)
    return dict(found)


def _of_groups(optimizer: Any) -> Iterator[tuple[nn.Parameter, FlatPiece]]:
    for number, parameters in enumerate(optimizer.bit16_groups):
        flat = optimizer.single_partition_of_fp32_groups[number]
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:
                yield parameter, FlatPiece(number, flat, 0, 0, 0, parameter.shape)
                continue
            own, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield parameter, FlatPiece(number, flat, own.start, whole.start, own.numel, parameter.shape)


def _of_parameters(optimizer: Any, rank: int) -> Iterator[tuple[nn.Parameter, FlatPiece]]:
    for number, parameters in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[number]
        for parameter in parameters:
            _, at, room = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first = rank * room
            length = max(0, min(room, parameter.ds_numel - first))
            group = optimizer.sub_group_to_group_id[number]
            yield parameter, FlatPiece(group, flat, at, first, length, parameter.ds_shape)
