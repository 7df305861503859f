"""What ranks agree on after each step: a few numbers in one exchange, which nobody waits for."""

import zlib
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError

_NOTHING: Final = -1 << 40  # below all numbers of an exchange


@final
class StepAgreement:
    """An all-reduce after each step that is always one step behind.

    What ranks do between two steps begins with one of the same form, for which they do wait. So a rank that went on to
    its next step instead is noticed, where two exchanges of different forms would end the process.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._sent: tuple[Tensor, Any] | None = None
        self._level = 0  # that the last exchange found
        self.facts: dict[str, Any] = {}  # that have to be the same on all ranks
        self.where = ""  # the line of the user's code that they are of
        self.compared, self.compared_where = self.facts, ""  # those of the last exchange
        self.figures: dict[str, float] = {}  # that should be, where a rank has some
        self.figures_differ = False  # those of the last exchange

    def exchange(self, level: int) -> int:
        """Begin an exchange after a step, and return the highest level of the last one, which is settled."""
        agreed, self._level = self._level, 0
        self.compared, self.compared_where = self.facts, self.where
        self._sent = self._reduce(level, 0)
        return agreed

    def settle(self) -> bool:
        """Wait for the last exchange after a step, and return whether the facts were the same on all ranks."""
        self.figures_differ = False
        if (found := self.wait()) is None:
            return True
        self._level, _, facts, _, _, other_facts, _ = found.tolist()
        if (met := self._elsewhere(found, 0)) is not None:
            raise UsageError(
                f"rank {met[1]} did not go on to its next step when this rank did; let all ranks do the same between "
                f"two steps"
            )
        return bool(facts == -other_facts)

    def meet(self, place: int) -> tuple[int, int] | None:
        """Wait for all ranks, once the last exchange is settled; return another place where a rank is, and which."""
        found, work = self._reduce(0, place)
        work.wait()
        return self._elsewhere(found, place)

    def wait(self) -> Tensor | None:
        """Wait for the last exchange after a step and return its numbers, once."""
        if self._sent is None:
            return None
        (found, work), self._sent = self._sent, None
        work.wait()
        return found

    def _reduce(self, level: int, place: int) -> tuple[Tensor, Any]:
        """Begin to find the highest level, and the highest and the lowest of all else."""
        own = [place * self._size + self._rank, _digest(self.facts), _digest(self.figures)]
        lowest = [-each for each in own]
        if not self.figures:
            own[-1] = lowest[-1] = _NOTHING
        self.figures = {}
        numbers = torch.tensor([level, *own, *lowest])
        return numbers, dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group, async_op=True)

    def _elsewhere(self, found: Tensor, place: int) -> tuple[int, int] | None:
        _, last, _, figures, first, _, other_figures = found.tolist()
        self.figures_differ |= figures + other_figures > 0
        return next((at for code in (last, -first) if (at := divmod(code, self._size))[0] != place), None)


def _digest(values: dict[str, Any]) -> int:
    return zlib.crc32(repr(values).encode())
