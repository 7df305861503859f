"""Named sums over numbered batches on several ranks, with the same bits for every distribution of the batches."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.world import World


@final
class NamedSums:
    """Adds up named tensors over batches.

    Integers are added immediately, because their sum is exact in any order. Floating-point values are stored in a table
    with one row per batch. The rows of other ranks' batches are zeros, so adding the tables of all ranks is exact. The
    rows are then summed with a single rounding. If `enabled` is False, `total` returns an empty dict.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._integer_sums: dict[str, Tensor] = {}
        self._rows: dict[int, dict[str, Tensor]] = {}

    def add(self, number: int, sums: Mapping[str, Tensor]) -> None:
        """Add the sums of batch `number`. Repeated calls for a batch, such as in recomputation, are ignored."""
        if number in self._rows:
            return
        self._rows[number] = {
            name: value.detach().double() for name, value in sums.items() if value.is_floating_point()
        }
        for name, value in sums.items():
            if name not in self._rows[number]:
                self._integer_sums[name] = (
                    self._integer_sums[name] + value if name in self._integer_sums else value.long()
                )

    def total(self, world: World, count: int) -> dict[str, Tensor]:
        """Return the sums over `count` batches, on the CPU. All ranks must call this and get the same result."""
        return sum_batches_over_ranks(world, self._integer_sums, self._rows, count) if self.enabled else {}


def sum_batches_over_ranks(
    world: World, integer_sums: Mapping[str, Tensor], rows: Mapping[int, Mapping[str, Tensor]], count: int
) -> dict[str, Tensor]:
    """Return the sums of `integer_sums` and of `rows` over all ranks. `rows` contains the values of each batch.

    Ranks without batches receive the names and shapes from the other ranks.
    """
    first = next(iter(rows.values()), {})
    own_shapes = [{name: list(tensor.shape) for name, tensor in group.items()} for group in (integer_sums, first)]
    integer_shapes, row_shapes = next(
        (shapes for shapes in world.all_gather_json(own_shapes) if any(shapes)), own_shapes
    )
    sums = {name: world.add_(_int_tensor(integer_sums.get(name), shape)) for name, shape in integer_shapes.items()}
    for name, shape in row_shapes.items():
        table = torch.zeros(count, *shape, dtype=torch.float64)
        if rows:
            table[list(rows)] = torch.stack([row[name] for row in rows.values()]).cpu()
        columns = world.add_(table).reshape(count, -1).T.tolist()
        # math.fsum rounds only once. torch.sum adds in an order that depends on the shape.
        sums[name] = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64).reshape(shape)
    return sums


def _int_tensor(value: Tensor | None, shape: list[int]) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64) if value is None else value.to("cpu", torch.int64).clone()


def sum_over_ranks(world: World, numbers: Sequence[int]) -> list[int]:
    """Return the sum of each integer over all ranks. All ranks must pass the same number of integers."""
    sums: list[int] = world.add_(torch.tensor(numbers, dtype=torch.int64)).tolist()
    return sums
