"""A queue that submits the gradients of a sharded model's units in the same order on all ranks."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from lockstep.errors import UsageError


@final
@dataclass(eq=False)
class GradientQueue:
    """Queues the gradients of units whose backward pass is complete, and submits them in a fixed order of the units.

    - `is_under_way` returns whether the gradients of a unit are still being computed.
    - `make_zeros` puts zeros into the queue for a unit that wasn't called.
    - `submit` submits the gradients of a unit, for example to a reduce-scatter. Its arguments are the unit, its flat
      gradients, the flat tensor that its sharded gradients are views of, and the result of `may_wait`: whether the call
      may wait for other ranks.

    If `submit` waits, it only waits for other ranks to submit units up to the current unit. By then, this rank has
    taken part in all gathers that the other ranks need to reach this unit, because gathers and submissions have the
    same order on all ranks. Therefore no deadlock is possible.
    """

    unit_names: Sequence[str]
    is_under_way: Callable[[int], bool]
    make_zeros: Callable[[int], None]
    submit: Callable[[int, Tensor, Tensor, bool], None]
    may_wait: Callable[[], bool]
    unit_order: Sequence[int] = ()  # the order of the units; empty until it is known
    _remaining_units: deque[int] = field(default_factory=deque, init=False)
    _queued: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _added_units: set[int] = field(default_factory=set, init=False)  # units added in this backward pass
    _late_gradients: list[Tensor] = field(default_factory=list, init=False)  # submitted late, so kept alive here
    _advancing: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Begin a backward pass. Submits zero gradients for units at the start of the order that weren't called."""
        self._remaining_units.extend(self.unit_order)
        self.submit_ready()

    def put(self, unit: int, gradients: Tensor, output: Tensor) -> None:
        """Put the gradients of a unit into the queue, and submit all gradients that are next in order."""
        if unit in self._added_units:  # autograd ran a node of this unit after its backward was considered complete
            raise UsageError(
                f"{self.unit_names[unit]} received another gradient after its backward was complete; use strategy ddp "
                "or zero1"
            )
        self._added_units.add(unit)
        self._queued[unit] = gradients, output  # the sharded gradients become views of `output`
        self.submit_ready(unit)

    def submit_ready(self, last_unit: int | None = None) -> None:
        """Submit the gradients of complete units in order. Submits zeros for units that weren't called.

        `last_unit` is the unit whose gradients fully_shard has just reduced.
        """
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._remaining_units:
                unit = self._remaining_units[0]
                if self.is_under_way(unit) and unit not in self._queued:
                    return
                if unit not in self._queued:
                    self.make_zeros(unit)
                self._remaining_units.popleft()
                if unit != last_unit:  # fully_shard keeps only the gradients of `last_unit` alive
                    self._late_gradients.append(self._queued[unit][0])
                self.submit(unit, *self._queued.pop(unit), self.may_wait())
        finally:
            self._advancing = False

    def end(self) -> None:
        """Submit all remaining gradients at the end of a backward pass."""
        self.submit_ready()
        for unit in sorted(self._queued):  # the order isn't known in the first backward pass
            self.submit(unit, *self._queued.pop(unit), True)

    def clear(self) -> None:
        """Reset the state after a backward pass."""
        self._late_gradients.clear()
        self._added_units.clear()
