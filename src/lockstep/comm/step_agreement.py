"""Compares a few numbers across ranks after each step, in a single background all-reduce."""

import zlib
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError

_NO_VALUE: Final = -1 << 40  # less than any number in the all-reduce


@final
class StepAgreement:
    """Compares numbers across ranks after each step in an all-reduce. The result is available one step later.

    All other communication between two steps starts with a blocking all-reduce of the same shape. If a rank is ahead
    and has started its next step, the two all-reduces match, and the mismatch is detected. Collectives of different
    shapes would abort the process.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = world_size
        self._sent: tuple[Tensor, Any] | None = None
        self._level = 0  # the highest level in the last completed all-reduce
        self.compared_values: dict[str, Any] = {}  # values that must be the same on all ranks
        self.call_site = ""  # the line of user code that set these values
        self.last_values, self.last_call_site = self.compared_values, ""  # the values in the last all-reduce
        self.metrics: dict[str, float] = {}  # should be the same on all ranks that report metrics
        self.metrics_differ = False  # whether the metrics differed in the last completed all-reduce

    def exchange(self, level: int) -> int:
        """Start the all-reduce of this step, and return the highest level of the previous one.

        Call `finish_check` first.
        """
        agreed_level, self._level = self._level, 0
        self.last_values, self.last_call_site = self.compared_values, self.call_site
        self._sent = self._start_all_reduce(level, 0)
        return agreed_level

    def finish_check(self) -> bool:
        """Wait for the all-reduce of the last step. Returns whether `compared_values` was the same on all ranks."""
        self.metrics_differ = False
        if (numbers := self.wait()) is None:
            return True
        self._level, _, digest, _, _, negated_digest, _ = numbers.tolist()
        if (mismatch := self._find_mismatch(numbers, 0)) is not None:
            raise UsageError(
                f"rank {mismatch[1]} did not start its next step when this rank did; make the same calls on all ranks "
                f"between two steps"
            )
        return bool(digest == -negated_digest)

    def compare_positions(self, position: int) -> tuple[int, int] | None:
        """Wait for all ranks, and check that they are at the same position in the program. Call `finish_check` first.

        Returns the position and rank of one of the ranks at a different position, or None.
        """
        numbers, work = self._start_all_reduce(0, position)
        work.wait()
        return self._find_mismatch(numbers, position)

    def wait(self) -> Tensor | None:
        """Wait for the all-reduce of the last step, and return its result. A second call returns None."""
        if self._sent is None:
            return None
        (numbers, work), self._sent = self._sent, None
        work.wait()
        return numbers

    def _start_all_reduce(self, level: int, position: int) -> tuple[Tensor, Any]:
        """Start an all-reduce that computes the maximum level, and the maximum and minimum of all other numbers."""
        values = [position * self._size + self._rank, _digest(self.compared_values), _digest(self.metrics)]
        negated = [-value for value in values]
        if not self.metrics:
            values[-1] = negated[-1] = _NO_VALUE
        self.metrics = {}
        numbers = torch.tensor([level, *values, *negated])
        return numbers, dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group, async_op=True)

    def _find_mismatch(self, reduced_values: Tensor, own_position: int) -> tuple[int, int] | None:
        _, max_code, _, metrics, negated_min_code, _, negated_metrics = reduced_values.tolist()
        self.metrics_differ |= metrics + negated_metrics > 0
        return next(
            (
                position
                for code in (max_code, -negated_min_code)
                if (position := divmod(code, self._size))[0] != own_position
            ),
            None,
        )


def _digest(values: dict[str, Any]) -> int:
    return zlib.crc32(repr(values).encode())
