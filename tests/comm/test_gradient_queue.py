"""Gradients of units are passed on in one order, whenever they come, and zeros of units that were not called."""

import pytest
import torch

from lockstep.comm.gradient_queue import GradientQueue
from lockstep.errors import UsageError

NAMES = ("first", "second", "third")


class Member:
    """A member whose `called` units are under way, and what its queue has passed on."""

    def __init__(self, *called: int) -> None:
        self.under_way = set(called)
        self.passed: list[tuple[int, float, bool]] = []
        self.patient = True
        self.queue = GradientQueue(NAMES, self.under_way.__contains__, self._zeros, self._pass_on, lambda: self.patient)

    def put(self, unit: int) -> None:
        self.under_way.remove(unit)
        self.queue.put(unit, torch.ones(1), torch.empty(1))

    def _zeros(self, unit: int) -> None:
        self.queue.put(unit, torch.zeros(1), torch.empty(1))

    def _pass_on(self, unit: int, gradients: torch.Tensor, output: torch.Tensor, may_wait: bool) -> None:
        self.passed.append((unit, gradients.item(), may_wait))


def test_until_an_order_is_known_all_is_passed_on_at_the_end() -> None:
    member = Member(0, 2)
    member.queue.begin()
    member.put(2)
    member.put(0)
    assert member.passed == []
    member.patient = False
    member.queue.end()
    assert member.passed == [(0, 1.0, True), (2, 1.0, True)]


def test_what_comes_early_waits_for_its_turn() -> None:
    member = Member(0, 1, 2)
    member.queue.unit_order = [2, 1, 0]
    member.queue.begin()
    member.put(1)
    assert member.passed == []
    member.put(2)
    assert member.passed == [(2, 1.0, True), (1, 1.0, True)]
    member.patient = False
    member.put(0)
    assert member.passed[2:] == [(0, 1.0, False)]


def test_units_that_were_not_called_have_zeros_in_their_turn() -> None:
    member = Member(0, 2)
    member.queue.unit_order = [2, 1, 0]
    member.queue.begin()
    member.put(2)
    assert member.passed == [(2, 1.0, True), (1, 0.0, True)]
    member.put(0)
    assert [unit for unit, *_ in member.passed] == [2, 1, 0]


def test_gradients_that_are_passed_on_late_are_kept_until_the_backward_is_over() -> None:
    """fully_shard keeps those alone that it has handed over last."""
    member = Member(0, 1, 2)
    member.queue.unit_order = [2, 1, 0]
    member.queue.begin()
    member.put(1)
    member.put(2)
    member.put(0)
    assert len(member.queue._late_gradients) == 1
    member.queue.clear()
    assert member.queue._late_gradients == []


def test_a_second_gradient_of_a_unit_in_one_backward_is_refused() -> None:
    member = Member(0, 1)
    member.queue.unit_order = [1, 0]
    member.queue.begin()
    member.put(1)
    with pytest.raises(
        UsageError, match="second received another gradient after its backward was complete; use strategy ddp or zero1"
    ):
        member._zeros(1)
    member.put(0)
    member.queue.end()
    member.queue.clear()
    member.under_way.update((0, 1))
    member.queue.begin()
    member.put(1)
    assert [unit for unit, *_ in member.passed] == [1, 0, 1]
