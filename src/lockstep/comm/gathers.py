"""Keeps the all-gathers of a sharded model in the same order on all ranks, even if ranks call different units.

Collectives in a process group must be issued in the same order on all ranks. However, the order in which a model calls
its units can depend on the input or on random numbers, as in a hand-written mixture of experts, and each rank has
different inputs. Therefore all ranks follow the same schedule, which the ranks record during the first forward pass and
the first backward pass:
1. Before a rank gathers a unit, all ranks tell each other which unit they need next. A rank that has finished reports
   that it needs no unit.
2. All ranks gather the first of the requested units. The ranks that requested this unit continue, and the other ranks
   go back to step 1.

Units that no rank requested are added to the schedule in their usual place. Once the schedule is complete, ranks no
longer need to communicate about the order. Before a rank gathers a unit, it joins all gathers that come earlier in the
schedule. At the end, it joins the gathers that are left. If a rank joined the gather of a unit before calling it, the
unit stays gathered until the rank calls it, or until the end of the phase.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

_NO_UNIT: Final = -1
# The error for a unit that is called outside of the forward pass of the placed model.
CALLED_ALONE: Final = (
    "is called on its own, but its weights are sharded by rows, and only the placed model gathers them"
)
CALL_THE_MODEL: Final = (
    "call the whole model (an argument of its forward can select the part to run), or use strategy ddp or zero1"
)


@final
@dataclass(eq=False)
class Gathers:
    """The gathers of a rank. All ranks must make the same calls to `begin` and `end`.

    - `ask` sends integers to all ranks and returns the integers of each rank.
    - `gather` gathers a unit if it isn't gathered, and calls `join_before` for this unit.
    - `scatter` frees a unit.
    - `joined` is called after this rank has joined a gather for other ranks.
    - `check` is called with a unit and the rest of the schedule before this rank gathers the unit. `check` raises an
      error if the unit can't be gathered.
    """

    ask: Callable[[Sequence[int]], Sequence[Sequence[int]]]
    gather: Callable[[int], None]
    scatter: Callable[[int], None]
    joined: Callable[[], None]
    check: Callable[[int, Sequence[int]], None]
    differed: bool = False  # whether ranks requested different units at the same time while a phase was recorded
    _schedules: dict[str, list[int]] = field(default_factory=dict)
    _phase: str | None = None
    _usual_order: Sequence[int] = ()
    _schedule: list[int] = field(default_factory=list)
    _position: int = 0
    _gathered_for_peers: list[int] = field(default_factory=list)  # units gathered for other ranks
    _joining: bool = False
    _issued: bool = False

    def begin(self, phase: str, usual_order: Sequence[int]) -> Sequence[int]:
        """Begin a phase, which has a separate schedule. Returns the schedule, or [] if it isn't recorded yet.

        `usual_order` is the order in which the units are likely to be called.
        """
        self._phase, self._usual_order, self._position, self.differed = phase, usual_order, 0, False
        self._schedule = self._schedules.get(phase, [])
        return self._schedule

    def remaining(self) -> Sequence[int]:
        """Return the units that all ranks will still gather, in order, or () if the schedule isn't recorded yet."""
        return self._schedule[self._position :] if self._phase in self._schedules else ()

    def join_before(self, unit: int) -> None:
        """Join the gathers of other ranks that come before `unit`. Called right before the collective of `unit`."""
        if self._joining:
            self._issued = True
            return
        if self._phase is None:  # outside of phases, all ranks call the same units
            return
        if self._phase in self._schedules:
            self.check(unit, self.remaining())
        while (next_unit := self._next_unit(unit)) != unit:
            self._join(next_unit)

    def reach(self, unit: int) -> None:
        """Join all gathers up to and including the last gather of a unit that this rank doesn't call."""
        while unit in self.remaining() if self._phase in self._schedules else unit not in self._schedule:
            self._join(self._next_unit(unit))

    def end(self, kept: bool = False, called: Sequence[int] | None = None) -> Sequence[int]:
        """Join the remaining gathers, free the units gathered for other ranks unless `kept`, and return the schedule.

        `called` contains 1 for each unit that this rank called, and 0 for all other units. If it is set, the units that
        some ranks called although no rank requested them are left out of the schedule of this phase.
        """
        assert self._phase is not None
        is_new = self._phase not in self._schedules
        while (next_unit := self._next_unit(_NO_UNIT)) != _NO_UNIT:
            self._join(next_unit)
        if is_new:
            self._add_unrequested(called)
            self._schedules[self._phase] = self._schedule
        for unit in () if kept else self._gathered_for_peers:
            self.scatter(unit)
        self._gathered_for_peers.clear()
        self._phase = None
        return self._schedule

    def _next_unit(self, requested: int) -> int:
        """Return the unit that all ranks gather next, or -1 if no unit remains."""
        if self._phase in self._schedules:
            if self._position == len(self._schedule):
                return _NO_UNIT
            self._position += 1
            return self._schedule[self._position - 1]
        answers = {unit for [unit] in self.ask([requested])}
        self.differed |= len(answers) > 1
        if answers == {_NO_UNIT}:
            return _NO_UNIT
        self._schedule.append(min(answers - {_NO_UNIT}, key=self._usual_order.index))
        return self._schedule[-1]

    def _add_unrequested(self, called: Sequence[int] | None) -> None:
        called_by_any = [any(flags) for flags in zip(*self.ask(called), strict=True)] if called is not None else []
        for position, unit in enumerate(self._usual_order):
            if unit in self._schedule or (called is not None and called_by_any[unit]):
                continue
            later_units = self._usual_order[position + 1 :]
            first = next(
                (index for index, scheduled in enumerate(self._schedule) if scheduled in later_units),
                len(self._schedule),
            )
            self._schedule.insert(first, unit)
            self._join(unit)

    def _join(self, unit: int) -> None:
        self._joining, self._issued = True, False
        try:
            self.gather(unit)
            if self._issued:
                self._gathered_for_peers.append(unit)
            else:  # the unit was already gathered and remains gathered
                self.scatter(unit)
                self.gather(unit)
        finally:
            self._joining = False
        self.joined()
