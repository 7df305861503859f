"""When the backward of a unit is complete: by the order of calls, or of several threads at the end."""

from threading import Thread

from lockstep.comm.unit_calls import UnitCalls


def forward(*units: int, of: int = 3) -> tuple[UnitCalls, list[int]]:
    """Return the calls of a forward, and their numbers; the last unit is the rest of the model."""
    calls = UnitCalls(of)
    calls.begin_forward()
    numbers = []
    for unit in units:
        calls.begin_call(unit)
        numbers.append(calls.end_call())
    return calls, numbers


def test_the_gradient_of_an_output_completes_what_was_first_called_after_it() -> None:
    calls, [first, second, third] = forward(0, 1, 2, of=4)
    assert calls.get_completed_units(third) == []
    assert calls.get_completed_units(first) == [2, 1]
    calls.mark_complete(2)
    assert calls.get_completed_units(second) == []
    assert calls.get_completed_units(first) == [1]


def test_a_unit_that_is_called_again_is_as_old_as_its_first_call() -> None:
    calls, numbers = forward(0, 1, 0, of=3)
    assert calls.get_completed_units(numbers[1]) == []
    assert calls.get_completed_units(numbers[0]) == [1]


def test_units_that_are_called_are_under_way_until_they_are_complete() -> None:
    calls, _ = forward(1)
    assert calls.get_call_flags() == [0, 1, 1]  # the rest of the model is called in each forward
    assert [calls.is_under_way(unit) for unit in range(3)] == [False, True, True]
    calls.mark_complete(1)
    assert [calls.is_under_way(unit) for unit in range(3)] == [False, False, True]
    calls.end_backward()
    assert [calls.is_complete(unit) for unit in range(3)] == [True] * 3
    calls.clear()
    assert calls.get_call_flags() == [0, 0, 0]
    assert not calls.is_complete(1)


def test_of_several_threads_the_order_of_calls_says_nothing() -> None:
    calls, [first, _] = forward(0, 1)
    assert not calls.has_several_threads
    thread = Thread(target=calls.begin_forward)
    thread.start()
    thread.join()
    assert calls.has_several_threads
    assert calls.num_forwards == 2
    assert calls.get_completed_units(first) == []
    assert [calls.record_gradient(1) for _ in range(3)] == [1, 2, 3]
