"""Functions go through exchanges together, one at a time and in their order."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.cooperative import CooperativeScheduler


class _Pass(torch.autograd.Function):
    """Gives what it is given, and makes one node for it all."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Any:
        return tuple(each.clone() for each in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def _passed(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return _Pass.apply(*given)


def _run(functions: Sequence[Callable[[], Any]], together: CooperativeScheduler) -> list[Any]:
    return together.run(functions, lambda number: None)


def _threads() -> int:
    return sum(thread.name == "cooperative" for thread in threading.enumerate())


def test_they_take_turns_in_their_order() -> None:
    together, seen, before = CooperativeScheduler([]), list[str](), list[int]()

    def function(number: int) -> int:
        seen.append(f"{number} begins")
        total = together.exchange("middle", lambda given: [sum(given)] * len(given), 10**number)
        seen.append(f"{number} has {total}")
        return 2 * number

    assert together.run([partial(function, number) for number in range(3)], before.append) == [0, 2, 4]
    assert seen == [*(f"{number} begins" for number in range(3)), *(f"{number} has 111" for number in range(3))]
    assert before == [0, 1, 2, 0, 1, 2]
    assert not _threads()


def test_one_alone_runs_where_it_is_called() -> None:
    together = CooperativeScheduler([])
    own = threading.current_thread()

    def function() -> str:
        assert threading.current_thread() is own
        return together.exchange("middle", lambda given: [f"{each}!" for each in given], "alone")

    assert _run([function], together) == ["alone!"]


def test_each_draws_what_it_would_draw_alone() -> None:
    together = CooperativeScheduler([torch.default_generator])

    def function(seed: int) -> list[float]:
        torch.manual_seed(seed)
        before = torch.rand(()).item()
        together.exchange("middle", list, None)
        return [before, torch.rand(()).item()]

    alone = [function(seed) for seed in (1, 2, 3)]
    assert _run([partial(function, seed) for seed in (1, 2, 3)], together) == alone


def test_each_keeps_the_state_that_torch_has_by_thread() -> None:
    together = CooperativeScheduler([])

    def function(number: int) -> tuple[bool, bool, bool]:
        with torch.set_grad_enabled(number == 1), torch.autocast("cpu", torch.bfloat16, enabled=number == 2):
            together.exchange("middle", list, None)
            inside = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return *inside, torch.is_grad_enabled()

    with torch.no_grad():
        found = _run([partial(function, number) for number in range(3)], together)
    assert found == [(False, False, False), (True, False, False), (False, True, False)]


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_are_added_in_the_order_in_which_they_are_alone(count: int) -> None:
    """What several exchanges use gets gradients whose sum shows their order; what uses these comes in another."""
    together = CooperativeScheduler([])

    def function(x: Tensor) -> Tensor:
        y = x * 1.0
        for _ in range(6):  # each makes a node in one thread alone
            y = together.exchange("before", _passed, y)
        passed = [together.exchange(f"use {number}", _passed, y) for number in range(3)]
        used = [each * weight for each, weight in zip(passed[::-1], (1.0, -1e8, 1e8), strict=True)]
        return torch.stack(used).sum()

    def gradients(count: int) -> list[float]:
        leaves = [torch.ones(1, requires_grad=True) for _ in range(count)]
        torch.autograd.backward(_run([partial(function, leaf) for leaf in leaves], together))
        return [float(leaf.grad) for leaf in leaves if leaf.grad is not None]

    assert gradients(count) == gradients(1) * count


def test_what_one_raises_ends_all_and_is_what_is_raised() -> None:
    together, ended = CooperativeScheduler([]), list[int]()

    def function(number: int) -> None:
        try:
            together.exchange("first", list, None)
            with contextlib.suppress(Exception):  # the code of a model may catch what it likes
                together.exchange("second", list, None)
            if number == 1:
                raise ZeroDivisionError("in the model")
            together.exchange("third", list, None)
        finally:
            ended.append(number)

    with pytest.raises(ZeroDivisionError, match="in the model"):
        _run([partial(function, number) for number in range(3)], together)
    assert sorted(ended) == [0, 1, 2]
    assert not _threads()


def test_what_a_joint_computation_raises_is_raised() -> None:
    together = CooperativeScheduler([])

    def joint(given: Sequence[int]) -> Sequence[int]:
        raise ZeroDivisionError("in the exchange")

    with pytest.raises(ZeroDivisionError, match="in the exchange"):
        _run([lambda: together.exchange("first", joint, 1)] * 2, together)
    assert not _threads()


@pytest.mark.parametrize("ways", [("here", "there"), ("here", None)])
def test_other_ways_are_refused(ways: tuple[str, str | None]) -> None:
    together = CooperativeScheduler([])

    def function(place: str | None) -> None:
        if place is not None:
            together.exchange(place, list, None)

    with pytest.raises(
        UsageError,
        match=f"reached here, but the forward pass of another micro-batch has reached {ways[1] or 'its end'}",
    ):
        _run([partial(function, place) for place in ways], together)
    assert not _threads()


def test_an_interrupt_ends_all() -> None:
    together = CooperativeScheduler([])

    def before(number: int) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        together.run([lambda: together.exchange("first", list, None)] * 2, before)
    assert not _threads()
    assert together.exchange("alone", list, 3) == 3
