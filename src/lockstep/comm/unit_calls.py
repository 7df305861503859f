"""Tracks the calls of a sharded model's units, and detects when the backward pass of each unit is complete.

fully_shard detects this with an autograd node before the inputs of a unit. This node adds up the gradients of an input
within the unit before the gradients from other units are added. Therefore the gradient of an activation that two units
use would have different bits than in a single process. Lockstep adds no such node, so the graph is the same as in plain
PyTorch.

Autograd runs the nodes of a thread's graph from newest to oldest. Therefore, once the gradient of the output of a unit
is ready, all units that were first called later are complete. This doesn't depend on which parameters a micro-batch
used. The first unit is complete at the end of the backward pass. If a backward pass covers forward passes on several
threads, a unit is complete once all of its parameters have a gradient, or at the end.
"""

import threading
from typing import final


@final
class UnitCalls:
    """Records the unit calls since the last backward pass, and which units have completed their backward pass.

    Units are identified by index. The last unit is the rest of the model. Its call begins first.
    """

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self.num_forwards = 0  # number of forward passes of the model
        self._calls = 0
        self._first: dict[int, int] = {}  # index of the first call, by unit
        self._threads: set[int] = set()  # threads of the forward passes
        self._complete: set[int] = set()
        self._accumulated = [0] * num_units  # number of parameters with a gradient, by unit

    def begin_forward(self) -> None:
        """Record the start of a forward pass of the model."""
        self.num_forwards += 1
        self._threads.add(threading.get_ident())
        self._first[self._num_units - 1] = -1

    def begin_call(self, unit: int) -> None:
        """Record the start of a call of a unit."""
        self._first.setdefault(unit, self._calls)

    def end_call(self) -> int:
        """Record the end of the current unit call, and return the index of this call."""
        self._calls += 1
        return self._calls - 1

    @property
    def has_several_threads(self) -> bool:
        """Whether forward passes ran on more than one thread."""
        return len(self._threads) > 1

    def get_call_flags(self) -> list[int]:
        """Return 1 for each unit that was called, and 0 for each unit that wasn't."""
        return [int(unit in self._first) for unit in range(self._num_units)]

    def get_completed_units(self, call_index: int) -> list[int]:
        """Return the units that become complete once the output gradient of call `call_index` is ready."""
        if self.has_several_threads:
            return []
        units = [unit for unit, first in self._first.items() if first > call_index and unit not in self._complete]
        return sorted(units, key=lambda unit: -self._first[unit])

    def record_gradient(self, unit: int) -> int:
        """Record that one more parameter of a unit has a gradient. Returns the number of these parameters."""
        self._accumulated[unit] += 1
        return self._accumulated[unit]

    def mark_complete(self, unit: int) -> None:
        """Record that the backward pass of a unit is complete."""
        self._complete.add(unit)

    def is_complete(self, unit: int) -> bool:
        """Return whether the backward pass of a unit is complete."""
        return unit in self._complete

    def is_under_way(self, unit: int) -> bool:
        """Return whether a unit was called, and its backward pass isn't complete yet."""
        return unit in self._first and unit not in self._complete

    def end_backward(self) -> None:
        """Record that the backward pass has ended, which completes all units."""
        self._complete.update(range(self._num_units))

    def forget_calls(self) -> None:
        """Forget all calls so far. Call this if they aren't part of the next backward pass."""
        self._first.clear()

    def clear(self) -> None:
        """Reset all state after a backward pass."""
        self.num_forwards = self._calls = 0
        self._first.clear()
        self._threads.clear()
        self._complete.clear()
        self._accumulated = [0] * self._num_units
