"""What a case comes to on one process, and that several come to the same, bit for bit, interrupted or not.

A case is one of toys, tokens or sequences; a placement is a strategy, a number of processes and the strategy's options.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import toys
import worlds
from toys import Trace

Placed = tuple[str, int, tuple[tuple[str, Any], ...]]

_KNOWN: dict[str, Trace] = {}  # a case need not be hashable


def alone(case: Any, run: Callable[..., Trace] = toys.whole_trace) -> Trace:
    """Return all there is to compare of a case on one process; it is run once in a session."""
    key = f"{run} {case}"
    if key not in _KNOWN:
        [_KNOWN[key]] = worlds.run(1, run, case)
    return _KNOWN[key]


def placed_as(case: Any, placed: Placed, **changes: Any) -> Any:
    """Return a case as it is placed, and otherwise changed."""
    return replace(case, strategy=placed[0], options=placed[2], **changes)


def assert_same_bits(case: Any, placed: Placed, run: Callable[..., Trace] = toys.whole_trace, **changes: Any) -> None:
    """Run a case as it is placed: every rank must say what the process alone says."""
    expected = alone(case, run)
    for rank, trace in enumerate(worlds.run(placed[1], run, placed_as(case, placed, **changes))):
        differing = [key for key in {**expected, **trace} if trace.get(key) != expected.get(key)]
        assert not differing, f"rank {rank} of {placed}"


def assert_resumed_bits(case: Any, first: Placed, second: Placed, at: int, module: Any = toys) -> None:
    """Do the first `at` steps of a case in one placement, and all others in another: the bits are those of one process.

    `module` has the `states` and the `whole_trace` of such cases.
    """
    half = placed_as(case, first, samples=case.samples[:at])
    state, trace = worlds.run(first[1], module.states, half, 0, None)[0]
    for _, rest in worlds.run(second[1], module.states, placed_as(case, second), at, state):
        assert {**trace, **rest} == alone(case, module.whole_trace)
