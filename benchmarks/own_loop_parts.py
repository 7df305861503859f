"""Where a step of an own loop spends its time: `python -m benchmarks.own_loop_parts`, CPU microseconds a step.

The same tiny MLP as in benchmarks/loop.py, in this process, by turns of the hand-written loop and of `lockstep.join`.
Then a clock is put around each part of the latter, and what the clock itself takes is subtracted: this is CPU time of
the process, so that a busy machine changes the figures by its caches alone. Shares are of the hand-written step, and
do not add up to the difference: what is between the parts is not in them, and some of them are in others.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks import loop
from lockstep.core import random
from lockstep.data.loader import Loader
from lockstep.loop import seeding
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.forward import ForwardContext
from lockstep.loop.guard import Guard
from lockstep.loop.loss_check import LossCheck
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.training.reports import StepReporter

STEPS, TURNS = 200, 20

_PARTS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("Python's and NumPy's generators, three times", seeding, "seed_python_and_numpy"),
    ("guards: is all as the last call of ours left it?", Guard, "check"),
    ("guards: note how all is, and the user's line", Guard, "mark"),
    ("guards: what stands in the places of gradients", Guard, "block_gradient_writes"),
    ("guards: gradients in their places again", Guard, "restore_gradients"),
    ("is the loss what it is called?", LossCheck, "check"),
    ("is the optimizer as it was, on all ranks?", PlacedModel, "register_update_settings"),
    ("keys of random numbers", random, "extend_key"),
    ("samples and micro-batches of the step", Loader, "_start_transfer"),
    ("which samples, planned in blocks", Loader, "_plan_requests"),
    ("the loss of the step, checked every 10 steps", StepReporter, "report"),
    ("begin the step", DataParallelEngine, "begin"),
    ("end the step: its sums", DataParallelEngine, "end"),
    ("leave the forward: buffers that must not move", ForwardContext, "leave"),
)


def main(steps: int = STEPS, turns: int = TURNS) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    hand = loop._hand_written(steps, None)  # type: ignore[arg-type]
    own = loop._own_loop(steps, None)  # type: ignore[arg-type]
    hand_us = own_us = 0.0
    for count in (1, turns):  # the first turns warm up
        pairs = [(_of_turn(hand, steps, exact=False), _of_turn(own, steps, exact=True)) for _ in range(count)]
        hand_us, own_us = median(one for one, _ in pairs), median(other for _, other in pairs)
    print(f"{hand_us:8.1f} us  hand-written\n{own_us:8.1f} us  lockstep.join, {own_us / hand_us:.3f} x")
    spent: defaultdict[str, list[float]] = defaultdict(list)
    clock_us = _clock()
    figures = []
    with ExitStack() as patches:
        for label, owner, name in _PARTS:
            patches.enter_context(patch.object(owner, name, _clocked(getattr(owner, name), spent[label])))
        for _ in range(turns):
            for each in spent.values():
                each.clear()
            _of_turn(own, steps, exact=True)
            figures.append({label: (sum(each) * 1e6 / steps, len(each) / steps) for label, each in spent.items()})
    for label in spent:
        us = median(each[label][0] - each[label][1] * clock_us for each in figures)
        print(f"{us:8.1f} us  {us / hand_us:6.1%}  {figures[0][label][1]:4.1f} times  {label}")


def _of_turn(turn: Callable[[], float], steps: int, *, exact: bool) -> float:
    """Return the CPU time of a turn of `steps` steps in microseconds a step."""
    torch.use_deterministic_algorithms(exact)
    began = time.process_time()
    turn()
    return (time.process_time() - began) / steps * 1e6


def _clocked(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def clocked(*args: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return call(*args, **named)
        finally:
            spent.append(time.process_time() - began)

    return clocked


def _clock() -> float:
    """Return the microseconds that the clock reports of a call that does nothing."""
    spent: list[float] = []
    nothing = _clocked(lambda: None, spent)
    for _ in range(2000):
        nothing()
    return median(spent) * 1e6


if __name__ == "__main__":
    main()
