"""Sums of named tensors over batches on several ranks. The bits don't depend on which rank has which batch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.common.user_code import make_refusal


class _NameInfo(NamedTuple):
    """The first batch that has a name, the position of the name in this batch, and the shape of its values."""

    batch_index: int
    position: int
    shape: list[int]


@final
class NamedSums:
    """Sums named tensors over batches and ranks. A batch without a value for a name adds 0.

    Integers are added immediately, because their sum is exact in any order. Floating-point values are stored in a table
    with one row per batch. In the table of a rank, the rows of other ranks' batches are zeros, so the sum of the tables
    is exact. The rows, and the integers of the same name, are then summed with a single rounding. If `enabled` is
    False, `compute_total` returns an empty dict.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._integer_sums: dict[str, Tensor] = {}
        self._rows: dict[int, dict[str, Tensor]] = {}
        self._infos: dict[str, _NameInfo] = {}

    def add(self, batch_index: int, sums: Mapping[str, Tensor]) -> None:
        """Add the sums of batch `batch_index`.

        Further calls for the same batch, such as in recomputation, are ignored. Raises UsageError if a value has
        another shape than in an earlier batch.
        """
        if batch_index in self._rows:
            return
        row = self._rows[batch_index] = {}
        for position, (name, value) in enumerate(sums.items()):
            info = _NameInfo(batch_index, position, list(value.shape))
            self._infos[name] = _merge_infos(name, [self._infos.get(name, info), info])
            if value.is_floating_point():
                row[name] = value.detach().double()
            else:
                self._integer_sums[name] = (
                    self._integer_sums[name] + value if name in self._integer_sums else value.long()
                )

    def compute_total(self, world: World, num_batches: int) -> dict[str, Tensor]:
        """Return the sums over `num_batches` batches, on the CPU of all ranks. All ranks must call this method.

        Names with only integers come first. Otherwise, names have the order in which batches introduce them. Raises
        UsageError if values of a name have different shapes on different ranks.
        """
        if not self.enabled:
            return {}
        float_names = sorted({name for row in self._rows.values() for name in row})
        gathered: list[Any] = world.all_gather_json([self._infos, [*self._integer_sums], float_names])
        infos = {
            name: _merge_infos(name, (_NameInfo(*infos[name]) for infos, _, _ in gathered if name in infos))
            for name in {name for infos, _, _ in gathered for name in infos}
        }
        with_integers = {name for _, names, _ in gathered for name in names}
        with_floats = {name for _, _, names in gathered for name in names}
        totals = {}
        for name in sorted(infos, key=lambda name: (name in with_floats, infos[name])):
            shape = infos[name].shape
            parts: list[list[float]] = []
            if name in with_integers:
                totals[name] = world.add_(_to_int_tensor(self._integer_sums.get(name), shape))
                parts = totals[name].reshape(1, -1).tolist()
            if name in with_floats:
                table = torch.zeros(num_batches, *shape, dtype=torch.float64)
                if batches := [number for number, row in self._rows.items() if name in row]:
                    table[batches] = torch.stack([self._rows[number][name] for number in batches]).cpu()
                parts += world.add_(table).reshape(num_batches, -1).tolist()
                # math.fsum rounds only once, while the order in which torch.sum adds depends on the shape.
                totals[name] = torch.tensor(
                    [math.fsum(column) for column in zip(*parts, strict=True)], dtype=torch.float64
                ).reshape(shape)
        return totals


def _merge_infos(name: str, infos: Iterable[_NameInfo]) -> _NameInfo:
    """Return the first of `infos` in batch order. Raises UsageError if their shapes differ."""
    merged, *others = sorted(infos)
    for other in others:
        if other.shape != merged.shape:
            subject = f"the values of {name} have" if name else "the values have"
            raise make_refusal(
                f"cannot sum over batches: {subject} shape {merged.shape} in one batch, and {other.shape} in another",
                "return values of the same shape for each batch",
            )
    return merged


def _to_int_tensor(value: Tensor | None, shape: list[int]) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64) if value is None else value.to("cpu", torch.int64).clone()


def sum_over_ranks(world: World, numbers: Sequence[int]) -> list[int]:
    """Sum each integer over all ranks. All ranks must call this function with the same number of integers."""
    sums: list[int] = world.add_(torch.tensor(numbers, dtype=torch.int64)).tolist()
    return sums
