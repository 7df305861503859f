"""What is submitted runs in order, beside the caller, and gives its result or its error to whoever waits."""

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch

from lockstep.comm.stream import CommStream, CudaStream, InlineStream, ThreadStream


@pytest.fixture(params=[InlineStream, ThreadStream])
def stream(request: pytest.FixtureRequest) -> Iterator[CommStream]:
    made: CommStream = request.param()
    yield made
    made.close()


def test_results_come_to_whoever_waits(stream: CommStream) -> None:
    waits = [stream.submit(partial(pow, number, 2)) for number in range(10)]
    assert [wait() for wait in reversed(waits)] == [number * number for number in reversed(range(10))]


def test_things_run_one_after_the_other(stream: CommStream) -> None:
    done: list[int] = []

    def note(number: int) -> None:
        time.sleep(0.02 if number == 0 else 0.0)
        done.append(number)

    waits = [stream.submit(partial(note, number)) for number in range(10)]
    waits[-1]()
    assert done == list(range(10))


def test_a_thread_runs_beside_the_caller() -> None:
    stream = ThreadStream()
    go = threading.Event()
    wait = stream.submit(lambda: go.wait(10))
    go.set()  # would come too late, were the caller waiting inside submit
    assert wait() is True
    assert stream.submit(threading.get_ident)() != threading.get_ident()
    stream.close()


def test_an_error_comes_to_whoever_waits() -> None:
    stream = ThreadStream()
    wait = stream.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        wait()
    stream.close()


def test_what_stands_behind_an_error_is_not_run() -> None:
    stream = ThreadStream()
    go = threading.Event()
    sent: list[int] = []
    failing = stream.submit(lambda: 1 // (not go.wait(10)))
    behind = stream.submit(lambda: sent.append(1))
    go.set()
    for wait in (failing, behind, stream.submit(lambda: sent.append(2))):
        with pytest.raises(ZeroDivisionError):
            wait()
    assert not sent
    stream.close()


def test_a_closed_lane_does_not_keep_the_program_alive() -> None:
    stream = ThreadStream()
    thread = stream.submit(threading.current_thread)()
    stream.close()
    thread.join(10)
    assert not thread.is_alive()


class Event:
    """An event of a stream that has come past it or not."""

    def __init__(self) -> None:
        self.past = False

    def query(self) -> bool:
        return self.past


def on_feigned_streams(monkeypatch: pytest.MonkeyPatch) -> CudaStream:
    stream = mock.Mock(record_event=lambda: Event())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock)
    return CudaStream(torch.device("cuda"))


class Piece:
    """Stands for memory of the computing stream."""


def test_what_a_stream_still_reads_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = on_feigned_streams(monkeypatch)
    pieces = [Piece() for _ in range(3)]
    left = weakref.WeakSet(pieces)
    waits = [stream.submit(partial(id, pieces.pop(0))) for _ in range(2)]
    assert len(left) == 3  # none of it may be given to others: the stream has done neither
    stream._in_flight[0][0].past = True  # type: ignore[attr-defined]
    waits.append(stream.submit(partial(id, pieces.pop())))
    assert len(left) == 2
    waits[1]()  # from here on the computing stream is behind it
    assert not left


@pytest.mark.slow("needs a card")
@pytest.mark.gpu
def test_a_stream_orders_itself_against_the_computing_one() -> None:
    device = torch.device("cuda")
    stream = CudaStream(device)
    values = torch.ones(1 << 24, device=device)
    for _ in range(20):
        values.add_(1)  # still running when the stream begins
    wait = stream.submit(lambda: values * 2)
    doubled = wait()
    assert doubled.min().item() == doubled.max().item() == 42.0
    stream.close()
