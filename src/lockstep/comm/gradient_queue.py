"""The queue of the gradients that a sharded model's units make, which all members pass on in one order."""

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

    `is_under_way` returns whether a unit's gradients are yet to come. If a unit was not called, `make_zeros` puts zeros
    for it. `pass_on` is called with a unit, its flat gradients, the flat tensor that its sharded gradients are views
    of, and whether it may wait for other members, which `may_wait` returns.

    When `pass_on` waits, it is for members that pass on what this one has passed on, or earlier units. What they gather
    before that, this one has gathered: all go through gathers and units in the same order.
    """

    names: Sequence[str]
    is_under_way: Callable[[int], bool]
    make_zeros: Callable[[int], None]
    pass_on: Callable[[int, Tensor, Tensor, bool], None]
    may_wait: Callable[[], bool]
    order: Sequence[int] = ()  # of the units, once it is known
    _due: deque[int] = field(default_factory=deque, init=False)
    _waiting: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _put: set[int] = field(default_factory=set, init=False)  # in this backward
    _kept: list[Tensor] = field(default_factory=list, init=False)  # what was passed on late, in this backward
    _advancing: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Begin a backward."""
        self._due.extend(self.order)
        self.advance()

    def put(self, unit: int, gradients: Tensor, output: Tensor) -> None:
        """Add a unit's gradients, and pass on those whose turn it is."""
        if unit in self._put:  # what autograd was to do last it did earlier
            raise UsageError(f"{self.names[unit]} has another gradient after its backward; use strategy ddp or zero1")
        self._put.add(unit)
        self._waiting[unit] = gradients, output  # the latter's views become the gradients
        self.advance(unit)

    def advance(self, handed: int | None = None) -> None:
        """Pass on what is complete, unit by unit, and zeros in the turn of units that were not called.

        `handed` is the unit whose gradients fully_shard has handed over last.
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
                if unit != handed:  # fully_shard keeps only what it has handed last
                    self._kept.append(self._waiting[unit][0])
                self.pass_on(unit, *self._waiting.pop(unit), self.may_wait())
        finally:
            self._advancing = False

    def end(self) -> None:
        """Pass on all that is left, once the backward is over."""
        self.advance()
        for unit in sorted(self._waiting):  # in the first backward of all there is no order yet
            self.pass_on(unit, *self._waiting.pop(unit), True)

    def clear(self) -> None:
        """Forget what was put and kept in a backward."""
        self._kept.clear()
        self._put.clear()
