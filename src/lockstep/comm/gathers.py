"""Keeps the all-gathers of a sharded model in the same order on all ranks, even if ranks call different units.

Collectives in a process group must be issued in the same order on all ranks. However, the order in which a model calls
its units can depend on the input or on random numbers, as in a hand-written mixture of experts. Therefore all ranks
follow the same schedule, which they record in the first forward pass and the first backward pass:

1. Before a rank gathers a unit, all ranks exchange the index of the unit that they need next. A rank that has finished
   reports that it needs no unit.
2. All ranks gather the first of the requested units. The ranks that requested this unit continue, and all other ranks
   go back to step 1.

Units that no rank requested are added to the schedule in their usual order. Once the schedule is complete, ranks no
longer communicate about the order. Before a rank gathers a unit, it takes part in all gathers that come earlier in the
schedule. At the end of a phase, it takes part in the remaining gathers. If a rank takes part in the gather of a unit
before it calls the unit, the unit stays gathered until the call or until the end of the phase.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

_NO_UNIT: Final = -1
# The reason in the error message if a unit is called outside the forward pass of the placed model.
CALLED_DIRECTLY: Final = (
    "is called on its own, but its weights are sharded by rows, and only the placed model gathers them"
)
CALL_MODEL_ADVICE: Final = (
    "call the whole model (an argument of its forward can select the part to run), or use strategy ddp or zero1"
)


@final
@dataclass(eq=False)
class ScheduledGathers:
    """Issues the all-gathers of a rank in scheduled order. All ranks must make the same calls of `begin` and `end`.

    - `exchange` all-gathers a list of integers.
    - `gather` gathers a unit if it isn't gathered yet. Before the collective, it must call `join_before` for the unit.
    - `reshard` frees the gathered parameters of a unit.
    - `on_join` is called after this rank has taken part in a gather for other ranks.
    - `check_unit` is called with a unit and the rest of the schedule before this rank gathers the unit. It must raise
      an error if the unit can't be gathered.
    """

    exchange: Callable[[Sequence[int]], Sequence[Sequence[int]]]
    gather: Callable[[int], None]
    reshard: Callable[[int], None]
    on_join: Callable[[], None]
    check_unit: Callable[[int, Sequence[int]], None]
    order_differed: bool = False  # whether ranks requested different units while this phase was recorded
    _schedules: dict[str, list[int]] = field(default_factory=dict)
    _phase: str | None = None
    _usual_order: Sequence[int] = ()
    _schedule: list[int] = field(default_factory=list)
    _position: int = 0
    _gathered_for_peers: list[int] = field(default_factory=list)  # units gathered for other ranks
    _joining: bool = False  # whether this rank is taking part in a gather for other ranks
    _gather_issued: bool = False  # whether the last `gather` issued a collective

    def begin(self, phase: str, usual_order: Sequence[int]) -> Sequence[int]:
        """Begin a phase, such as a forward pass. Returns its schedule, or [] if the schedule isn't recorded yet.

        Each phase has a separate schedule. `usual_order` is the order in which units are expected to be called.
        """
        self._phase, self._usual_order, self._position, self.order_differed = phase, usual_order, 0, False
        self._schedule = self._schedules.get(phase, [])
        return self._schedule

    def remaining(self) -> Sequence[int]:
        """Return the rest of the schedule of this phase, or () if the schedule isn't recorded yet."""
        return self._schedule[self._position :] if self._phase in self._schedules else ()

    def join_before(self, unit: int) -> None:
        """Take part in the pending all-gathers of earlier units. Call this right before the all-gather of `unit`."""
        if self._joining:
            self._gather_issued = True
            return
        if self._phase is None:  # outside of phases, all ranks call the same units
            return
        if self._phase in self._schedules:
            self.check_unit(unit, self.remaining())
        while (next_unit := self._next_unit(unit)) != unit:
            self._join(next_unit)

    def join_through(self, unit: int) -> None:
        """Take part in all gathers up to the last gather of `unit`. Call this if this rank doesn't call `unit`."""
        while unit in self.remaining() if self._phase in self._schedules else unit not in self._schedule:
            self._join(self._next_unit(unit))

    def end(self, keep_gathered: bool = False, call_flags: Sequence[int] | None = None) -> Sequence[int]:
        """Take part in the remaining gathers of a phase, and return the schedule of the phase.

        Frees the units that were gathered for other ranks, unless `keep_gathered` is set. `call_flags` contains 1 for
        each unit that this rank called, and 0 for all other units. If it is set, units that any rank called without
        gathering them are left out of the schedule.
        """
        assert self._phase is not None
        is_new = self._phase not in self._schedules
        while (next_unit := self._next_unit(_NO_UNIT)) != _NO_UNIT:
            self._join(next_unit)
        if is_new:
            self._add_unrequested_units(call_flags)
            self._schedules[self._phase] = self._schedule
        for unit in () if keep_gathered else self._gathered_for_peers:
            self.reshard(unit)
        self._gathered_for_peers.clear()
        self._phase = None
        return self._schedule

    def _next_unit(self, requested: int) -> int:
        """Return the unit that all ranks gather next, or -1 if there are no more units to gather."""
        if self._phase in self._schedules:
            if self._position == len(self._schedule):
                return _NO_UNIT
            self._position += 1
            return self._schedule[self._position - 1]
        answers = {unit for [unit] in self.exchange([requested])}
        self.order_differed |= len(answers) > 1
        if answers == {_NO_UNIT}:
            return _NO_UNIT
        self._schedule.append(min(answers - {_NO_UNIT}, key=self._usual_order.index))
        return self._schedule[-1]

    def _add_unrequested_units(self, call_flags: Sequence[int] | None) -> None:
        """Insert the units that no rank requested into the schedule, in the usual order, and gather them."""
        called_by_any = (
            [any(flags) for flags in zip(*self.exchange(call_flags), strict=True)] if call_flags is not None else []
        )
        for position, unit in enumerate(self._usual_order):
            if unit in self._schedule or (call_flags is not None and called_by_any[unit]):
                continue
            later_units = self._usual_order[position + 1 :]
            first = next(
                (index for index, scheduled in enumerate(self._schedule) if scheduled in later_units),
                len(self._schedule),
            )
            self._schedule.insert(first, unit)
            self._join(unit)

    def _join(self, unit: int) -> None:
        self._joining, self._gather_issued = True, False
        try:
            self.gather(unit)
            if self._gather_issued:
                self._gathered_for_peers.append(unit)
            else:  # the unit was already gathered and remains gathered
                self.reshard(unit)
                self.gather(unit)
        finally:
            self._joining = False
        self.on_join()
