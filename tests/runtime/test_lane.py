"""What is submitted runs in order, beside the caller, and gives its result or its error to whoever waits."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from lockstep.runtime.lane import InlineLane, Lane, StreamLane, ThreadLane


@pytest.fixture(params=[InlineLane, ThreadLane])
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    made: Lane = request.param()
    yield made
    made.close()


def test_results_come_to_whoever_waits(lane: Lane) -> None:
    waits = [lane.submit(partial(pow, number, 2)) for number in range(10)]
    assert [wait() for wait in reversed(waits)] == [number * number for number in reversed(range(10))]


def test_things_run_one_after_the_other(lane: Lane) -> None:
    done: list[int] = []

    def note(number: int) -> None:
        time.sleep(0.02 if number == 0 else 0.0)
        done.append(number)

    waits = [lane.submit(partial(note, number)) for number in range(10)]
    waits[-1]()
    assert done == list(range(10))


def test_a_thread_runs_beside_the_caller() -> None:
    lane = ThreadLane()
    go = threading.Event()
    wait = lane.submit(lambda: go.wait(10))
    go.set()  # would come too late, were the caller waiting inside submit
    assert wait() is True
    assert lane.submit(threading.get_ident)() != threading.get_ident()
    lane.close()


def test_an_error_comes_to_whoever_waits() -> None:
    lane = ThreadLane()
    wait = lane.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        wait()
    assert lane.submit(lambda: 5)() == 5
    lane.close()


def test_a_closed_lane_does_not_keep_the_program_alive() -> None:
    lane = ThreadLane()
    thread = lane.submit(threading.current_thread)()
    lane.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_orders_itself_against_the_computing_one() -> None:
    device = torch.device("cuda")
    lane = StreamLane(device)
    values = torch.ones(1 << 24, device=device)
    for _ in range(20):
        values.add_(1)  # still running when the lane begins
    wait = lane.submit(lambda: values * 2)
    doubled = wait()
    assert doubled.min().item() == doubled.max().item() == 42.0
    lane.close()
