"""Sums of named tensors over batches on several ranks. The bits don't depend on which rank has which batch."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.world import World


@final
class NamedSums:
    """Sums named tensors over batches and ranks.

    Integers are added immediately, because their sum is exact in any order. Floating-point values are stored in a table
    with one row per batch. In the table of a rank, the rows of other ranks' batches are zeros, so the sum of the tables
    is exact. The rows are then summed with a single rounding. If `enabled` is False, `compute_total` returns an empty
    dict.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._integer_sums: dict[str, Tensor] = {}
        self._rows: dict[int, dict[str, Tensor]] = {}

    def add(self, batch_index: int, sums: Mapping[str, Tensor]) -> None:
        """Add the sums of batch `batch_index`.

        Further calls for the same batch, such as in recomputation, are ignored.
        """
        if batch_index in self._rows:
            return
        self._rows[batch_index] = {
            name: value.detach().double() for name, value in sums.items() if value.is_floating_point()
        }
        for name, value in sums.items():
            if name not in self._rows[batch_index]:
                self._integer_sums[name] = (
                    self._integer_sums[name] + value if name in self._integer_sums else value.long()
                )

    def compute_total(self, world: World, num_batches: int) -> dict[str, Tensor]:
        """Return the sums over `num_batches` batches, on the CPU of all ranks. All ranks must call this method."""
        return sum_batches_over_ranks(world, self._integer_sums, self._rows, num_batches) if self.enabled else {}


def sum_batches_over_ranks(
    world: World,
    integer_sums: Mapping[str, Tensor],
    rows_by_batch: Mapping[int, Mapping[str, Tensor]],
    num_batches: int,
) -> dict[str, Tensor]:
    """Return the sums of `integer_sums` and of `rows_by_batch` over all ranks. All ranks must call this function.

    `rows_by_batch` contains the values for each of this rank's batches, by batch number. `num_batches` is the number of
    batches on all ranks. Ranks without batches get the names and shapes from other ranks.
    """
    first = next(iter(rows_by_batch.values()), {})
    own_shapes = [{name: list(tensor.shape) for name, tensor in group.items()} for group in (integer_sums, first)]
    integer_shapes, row_shapes = next(
        (shapes for shapes in world.all_gather_json(own_shapes) if any(shapes)), own_shapes
    )
    sums = {name: world.add_(_to_int_tensor(integer_sums.get(name), shape)) for name, shape in integer_shapes.items()}
    for name, shape in row_shapes.items():
        table = torch.zeros(num_batches, *shape, dtype=torch.float64)
        if rows_by_batch:
            table[list(rows_by_batch)] = torch.stack([row[name] for row in rows_by_batch.values()]).cpu()
        columns = world.add_(table).reshape(num_batches, -1).T.tolist()
        # math.fsum rounds only once, while the order in which torch.sum adds depends on the shape.
        sums[name] = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64).reshape(shape)
    return sums


def _to_int_tensor(value: Tensor | None, shape: list[int]) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64) if value is None else value.to("cpu", torch.int64).clone()


def sum_over_ranks(world: World, numbers: Sequence[int]) -> list[int]:
    """Sum each integer over all ranks. All ranks must call this function with the same number of integers."""
    sums: list[int] = world.add_(torch.tensor(numbers, dtype=torch.int64)).tolist()
    return sums
