"""Sums by name over numbered batches on several ranks, with the same bits for every distribution of the batches."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.world import World


@final
class NamedSums:
    """The sums of this rank's batches.

    Integers are added immediately, because their sum is exact in any order. For all other values, each batch has its
    own row in a table of zeros. Adding the tables of all ranks is therefore exact, and the rows are then summed in a
    fixed order. If `enabled` is False, `total` returns nothing.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._whole: dict[str, Tensor] = {}
        self._rows: dict[int, dict[str, Tensor]] = {}

    def add(self, number: int, sums: Mapping[str, Tensor]) -> None:
        """Add the sums of batch `number`. A second call for the same batch, as in a recomputed forward, is ignored."""
        if number in self._rows:
            return
        self._rows[number] = {
            name: value.detach().double() for name, value in sums.items() if value.is_floating_point()
        }
        for name, value in sums.items():
            if name not in self._rows[number]:
                self._whole[name] = self._whole[name] + value if name in self._whole else value.long()

    def total(self, world: World, count: int) -> dict[str, Tensor]:
        """Return the sums over `count` batches, on the CPU. All ranks call it and get the same result."""
        return add_over_ranks(world, self._whole, self._rows, count) if self.enabled else {}


def add_over_ranks(
    world: World, whole: Mapping[str, Tensor], rows: Mapping[int, Mapping[str, Tensor]], count: int
) -> dict[str, Tensor]:
    """Sum `whole` integers, and `rows` by batch number, over all ranks.

    A rank without a batch learns the names and shapes from the other ranks.
    """
    first = next(iter(rows.values()), {})
    own_shapes = [{name: list(tensor.shape) for name, tensor in kind.items()} for kind in (whole, first)]
    whole_shapes, row_shapes = next((shapes for shapes in world.told_by_all(own_shapes) if any(shapes)), own_shapes)
    sums = {name: world.add_(_int_tensor(whole.get(name), shape)) for name, shape in whole_shapes.items()}
    for name, shape in row_shapes.items():
        table = torch.zeros(count, *shape, dtype=torch.float64)
        if rows:
            table[list(rows)] = torch.stack([row[name] for row in rows.values()]).cpu()
        columns = world.add_(table).reshape(count, -1).T.tolist()
        # Rounded once. The order of torch's sum depends on the shape.
        sums[name] = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64).reshape(shape)
    return sums


def _int_tensor(value: Tensor | None, shape: list[int]) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64) if value is None else value.to("cpu", torch.int64).clone()


def over_ranks(world: World, numbers: Sequence[int]) -> list[int]:
    """Return the sum of each integer over all ranks. All ranks call it with as many integers."""
    sums: list[int] = world.add_(torch.tensor(numbers, dtype=torch.int64)).tolist()
    return sums
