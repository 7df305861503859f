"""The order in which the members of a sharded model gather its units: one for all, whatever each of them calls.

Collectives of a group pair up in the order in which they are issued. But a model may call its units as samples or
chance decide, as a mixture of experts written by hand does, and each member has other samples. So what is gathered
follows a schedule, which all members have. They learn it where there is none yet, in the first forward and the first
backward:

1. Before a member gathers a unit, all tell each other which unit they want. A member that is through wants none.
2. Of the units that are wanted the first is gathered by all. Who wants it goes on, the others tell again.

What was gathered, one after the other, is the schedule, with the units that nobody wanted in their usual places. From
then on nobody asks: a member takes part in all gathers that the schedule has before the unit that it is about to
call, and at its end in those that are left. What it has gathered but not called stays until it calls it, or the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

_NONE: Final = -1
# What is said of a module that is called outside of the forward that gathers it.
CALLED_ALONE: Final = "is called by itself, and its weights are in rows, which the placed model gathers"
CALL_THE_MODEL: Final = (
    "call the model as a whole, whose forward may take an argument for what it does; or use strategy ddp or zero1"
)


@final
@dataclass(eq=False)
class Gathers:
    """The gathers of one member; every member calls `begin` and `end` alike.

    `ask` gives numbers to all members and returns theirs. `gather` gathers a unit if it is not gathered, for which it
    calls `before`; `scatter` frees it. `taken` is called when this member has taken part in a gather for others, and
    `check`, with what is left of the schedule, for a unit that it is about to gather: it raises where that cannot be.
    """

    ask: Callable[[Sequence[int]], Sequence[Sequence[int]]]
    gather: Callable[[int], None]
    scatter: Callable[[int], None]
    taken: Callable[[], None]
    check: Callable[[int, Sequence[int]], None]
    differed: bool = False  # whether members wanted different units at the same time, in a phase that was learned
    _known: dict[str, list[int]] = field(default_factory=dict)
    _phase: str | None = None
    _usual: Sequence[int] = ()
    _schedule: list[int] = field(default_factory=list)
    _at: int = 0
    _held: list[int] = field(default_factory=list)  # gathered for others
    _taking_part: bool = False
    _issued: bool = False

    def begin(self, phase: str, usual: Sequence[int]) -> Sequence[int]:
        """Begin what has a schedule of its own, and return that; empty where it is yet to be learned.

        `usual` is the order in which units are likely to be wanted.
        """
        self._phase, self._usual, self._at, self.differed = phase, usual, 0, False
        self._schedule = self._known.get(phase, [])
        return self._schedule

    def remaining(self) -> Sequence[int]:
        """Return what all will still gather, one after the other; nothing where that is not known."""
        return self._schedule[self._at :] if self._phase in self._known else ()

    def before(self, unit: int) -> None:
        """Call just before a unit's collective: take part in what others gather before it."""
        if self._taking_part:
            self._issued = True
            return
        if self._phase is None:  # outside of all phases members do the same
            return
        if self._phase in self._known:
            self.check(unit, self.remaining())
        while (served := self._next(unit)) != unit:
            self._take_part(served)

    def reach(self, unit: int) -> None:
        """Take part in all gathers up to the last one of a unit that this member does not call."""
        while unit in self.remaining() if self._phase in self._known else unit not in self._schedule:
            self._take_part(self._next(unit))

    def end(self, kept: bool = False, called: Sequence[int] | None = None) -> Sequence[int]:
        """Take part in what others still gather, and free what was gathered for them, unless it is `kept`.

        Returns the schedule. Where `called` is given, with 1 for each unit that this member has called, units that some
        have called and nobody wanted are in no later schedule of this phase.
        """
        assert self._phase is not None
        learned = self._phase not in self._known
        while (served := self._next(_NONE)) != _NONE:
            self._take_part(served)
        if learned:
            self._add_unwanted(called)
            self._known[self._phase] = self._schedule
        for unit in () if kept else self._held:
            self.scatter(unit)
        self._held.clear()
        self._phase = None
        return self._schedule

    def _next(self, wanted: int) -> int:
        """Return the unit that is gathered next, none where nothing is."""
        if self._phase in self._known:
            if self._at == len(self._schedule):
                return _NONE
            self._at += 1
            return self._schedule[self._at - 1]
        answers = {each for [each] in self.ask([wanted])}
        self.differed |= len(answers) > 1
        if answers == {_NONE}:
            return _NONE
        self._schedule.append(min(answers - {_NONE}, key=self._usual.index))
        return self._schedule[-1]

    def _add_unwanted(self, called: Sequence[int] | None) -> None:
        by_some = [any(each) for each in zip(*self.ask(called), strict=True)] if called is not None else []
        for place, unit in enumerate(self._usual):
            if unit in self._schedule or (called is not None and by_some[unit]):
                continue
            later = self._usual[place + 1 :]
            first = next((at for at, other in enumerate(self._schedule) if other in later), len(self._schedule))
            self._schedule.insert(first, unit)
            self._take_part(unit)

    def _take_part(self, unit: int) -> None:
        self._taking_part, self._issued = True, False
        try:
            self.gather(unit)
            if self._issued:
                self._held.append(unit)
            else:  # it is there already, and stays
                self.scatter(unit)
                self.gather(unit)
        finally:
            self._taking_part = False
        self.taken()
