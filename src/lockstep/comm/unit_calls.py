"""The calls of a sharded model's units, and when the backward of each is complete.

fully_shard finds out by an autograd node of its own, which it puts in front of a unit's inputs. That node adds up the
unit's own gradients of an input before those of its other readers, so an activation that two units read would get
another gradient than in one process. There is no such node here: the graph is the one that plain PyTorch builds.

Autograd runs the nodes of one thread's graph from the newest to the oldest. So once the gradient of a unit's output is
there, all units that were first called after it are complete, and their gradients are handed on, whichever of their
parameters a micro-batch used. The first unit is complete at the end of the backward. If a backward goes through the
forwards of several threads, a unit is complete once each of its parameters has a gradient, or at the end.
"""

import threading
from typing import final


@final
class UnitCalls:
    """The calls of units since the last backward, and the units whose backward is complete in the one under way.

    Units are numbered; the last one is the rest of the model, and called first.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self.passes = 0  # forwards of the model
        self._calls = 0
        self._first: dict[int, int] = {}  # of each unit: the number of its first call
        self._threads: set[int] = set()  # in which the forwards were
        self._complete: set[int] = set()
        self._accumulated = [0] * units  # parameters of each unit that have their gradient

    def begin_forward(self) -> None:
        """Begin a forward of the model."""
        self.passes += 1
        self._threads.add(threading.get_ident())
        self._first[self._units - 1] = -1

    def begin_call(self, unit: int) -> None:
        """Begin a call of a unit."""
        self._first.setdefault(unit, self._calls)

    def end_call(self) -> int:
        """End a call of a unit, and return its number."""
        self._calls += 1
        return self._calls - 1

    @property
    def several_threads(self) -> bool:
        """Whether the forwards were in several threads."""
        return len(self._threads) > 1

    def called(self) -> list[int]:
        """Return 1 for each unit that was called, and 0 for each other."""
        return [int(unit in self._first) for unit in range(self._units)]

    def completed_by(self, call: int) -> list[int]:
        """Return the units that are complete, and were not yet, once the output of a call has its gradient."""
        if self.several_threads:
            return []
        done = [unit for unit, first in self._first.items() if first > call and unit not in self._complete]
        return sorted(done, key=lambda unit: -self._first[unit])

    def accumulate(self, unit: int) -> int:
        """Note that a parameter of a unit has its gradient, and return how many of them have."""
        self._accumulated[unit] += 1
        return self._accumulated[unit]

    def complete(self, unit: int) -> None:
        """Note that the backward of a unit is complete."""
        self._complete.add(unit)

    def is_complete(self, unit: int) -> bool:
        """Return whether the backward of a unit is complete."""
        return unit in self._complete

    def is_under_way(self, unit: int) -> bool:
        """Return whether a unit was called, and its backward is not complete."""
        return unit in self._first and unit not in self._complete

    def end_backward(self) -> None:
        """Note that the backward is over: every unit is complete."""
        self._complete.update(range(self._units))

    def forget_calls(self) -> None:
        """Forget who was called: these calls have no part in the next backward."""
        self._first.clear()

    def clear(self) -> None:
        """Begin anew, after a backward."""
        self.passes = self._calls = 0
        self._first.clear()
        self._threads.clear()
        self._complete.clear()
        self._accumulated = [0] * self._units
