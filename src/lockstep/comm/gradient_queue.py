"""The queue of the gradients of a sharded model's units, which all ranks pass on in the same order."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from lockstep.errors import UsageError


@final
@dataclass(eq=False)
class GradientQueue:
    """The gradients of units whose backward is complete, until it is their turn.

    - `is_under_way` returns whether the gradients of a unit are still to come.
    - `make_zeros` adds zeros for a unit that wasn't called.
    - `pass_on` is called with a unit, its flat gradients, the flat tensor that its sharded gradients are views of, and
      whether it may wait for other ranks. `may_wait` returns the latter.

    If `pass_on` waits, it only waits for ranks to pass on units that this rank has passed on, or earlier units.
    Everything that the other ranks gather before that, this rank has gathered too, because all ranks go through gathers
    and units in the same order.
    """

    names: Sequence[str]
    is_under_way: Callable[[int], bool]
    make_zeros: Callable[[int], None]
    pass_on: Callable[[int, Tensor, Tensor, bool], None]
    may_wait: Callable[[], bool]
    order: Sequence[int] = ()  # the order of the units, once it is known
    _due: deque[int] = field(default_factory=deque, init=False)
    _waiting: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _put: set[int] = field(default_factory=set, init=False)  # units added in this backward
    _kept: list[Tensor] = field(default_factory=list, init=False)  # gradients passed on late in this backward
    _advancing: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Begin a backward."""
        self._due.extend(self.order)
        self.advance()

    def put(self, unit: int, gradients: Tensor, output: Tensor) -> None:
        """Add the gradients of a unit, and pass on those whose turn it is."""
        if unit in self._put:  # autograd ran a node earlier than expected
            raise UsageError(f"{self.names[unit]} has another gradient after its backward; use strategy ddp or zero1")
        self._put.add(unit)
        self._waiting[unit] = gradients, output  # views of `output` become the gradients
        self.advance(unit)

    def advance(self, last_unit: int | None = None) -> None:
        """Pass on complete units in order, with zeros for units that weren't called.

        `last_unit` is the unit whose gradients fully_shard passed last.
        """
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._due:
                unit = self._due[0]
                if self.is_under_way(unit) and unit not in self._waiting:
                    return
                if unit not in self._waiting:
                    self.make_zeros(unit)
                self._due.popleft()
                if unit != last_unit:  # fully_shard only keeps the gradients that it passed last
                    self._kept.append(self._waiting[unit][0])
                self.pass_on(unit, *self._waiting.pop(unit), self.may_wait())
        finally:
            self._advancing = False

    def end(self) -> None:
        """Pass on all remaining gradients after the backward."""
        self.advance()
        for unit in sorted(self._waiting):  # the order isn't known in the first backward
            self.pass_on(unit, *self._waiting.pop(unit), True)

    def clear(self) -> None:
        """Release the state of a backward."""
        self._kept.clear()
        self._put.clear()
