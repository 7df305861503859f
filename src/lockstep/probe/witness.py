"""Records which lines read values that differ between processes or calls: clocks, ranks, random generators.

A Python profiler sees each call, and a tracer sees each line outside of libraries. Together, they make a forward pass
several times slower, so they only run if there is a difference to explain.
"""

import datetime
import os
import random as python_random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, final

import numpy as np
import torch

from lockstep.common.own_code import is_installed, location
from lockstep.setup.user_code import is_library_file, place_of_frame

CLOCK: Final = "the clock"
SYSTEM: Final = "the system's randomness"
PROCESS: Final = "the process id"
HOST: Final = "the host name"
RANK: Final = "the rank or the number of ranks"
PYTHON: Final = "Python's"  # names of random generators
NUMPY: Final = "NumPy's"
TORCH: Final = "torch's"

_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_RUN_ATTRIBUTES: Final = ("rank", "size")  # attributes of lockstep's Run
_RANK_FUNCTIONS: Final = ("get_rank", "get_world_size", "get_node_local_rank")  # functions of torch.distributed


@contextmanager
def record_reads(counts: Callable[[], int] = lambda: 1) -> Iterator[Mapping[str, str]]:
    """Record reads and random draws while the block runs. The yielded dict contains the line of each.

    While `counts` returns 0, only reads of the rank are recorded. If the value of `counts` changes, the random
    generators were seeded in between, so changes of their state are ignored.
    """
    reads: dict[str, str] = {}
    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(_Calls(reads, counts).note)
    sys.settrace(_Draws(reads, counts).begin)
    try:
        yield reads
    finally:
        sys.settrace(before[1])
        sys.setprofile(before[0])


@final
class _Calls:
    """A profiler that records calls of functions whose result depends on the process or the time."""

    def __init__(self, reads: dict[str, str], counts: Callable[[], int]) -> None:
        self._reads = reads
        self._counts = counts
        clocks = (time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns)
        dates = (datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today)
        self._names: dict[Any, str] = {
            **dict.fromkeys((*clocks, *dates, time.localtime, time.gmtime, time.process_time), CLOCK),
            **dict.fromkeys((os.urandom, os.getrandom), SYSTEM),
            os.getpid: PROCESS,
            socket.gethostname: HOST,
        }

    def note(self, frame: FrameType, event: str, function: Any) -> None:
        source, reader = None, frame
        if event == "c_call":
            source = self._names.get(function)
        elif event == "call" and _reads_rank(frame):
            source, reader = RANK, frame.f_back or frame
        if source is not None and (source == RANK or self._counts()) and (location := place_of_frame(reader)):
            self._reads.setdefault(source, location)


@final
class _Draws:
    """A tracer that records the lines that advance a random generator. The profiler doesn't see draws from NumPy."""

    def __init__(self, reads: dict[str, str], counts: Callable[[], int]) -> None:
        self._reads = reads
        self._counts = counts
        self._frames: list[tuple[FrameType, int]] = []  # running frames outside of libraries, with their current lines
        self._counted = counts()  # value of `counts` at the last check
        # Generator states at the last check.
        self._states: dict[str, Any] = self._current_states() if self._counted else {}

    def begin(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if (
            event != "call" or is_library_file(file) or (is_installed(file) and not self._counts())
        ):  # for example an import
            return None
        self._compare_states()
        self._frames.append((frame, frame.f_lineno))
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event in ("line", "return"):
            self._compare_states()
            if event == "return":
                self._frames.pop()
            else:
                self._frames[-1] = frame, frame.f_lineno
        return self._trace_line

    def _compare_states(self) -> None:
        """Attribute state changes since the last check to the line that was running.

        Changes that occur while no traced code is running aren't attributed to a line.
        """
        before, self._counted = self._counted, self._counts()
        if self._counted != before:
            self._states = {}
        if not self._counted:
            return
        states = self._current_states()
        for name in [name for name, state in self._states.items() if states[name] != state] if self._frames else []:
            frame, line = self._frames[-1]
            self._reads.setdefault(name, location(frame.f_code.co_filename, line))
        self._states = states

    def _current_states(self) -> dict[str, Any]:
        _, key, position, *_rest = np.random.get_state(legacy=True)
        torch_state = torch.get_rng_state().numpy().tobytes()
        return {PYTHON: python_random.getstate(), NUMPY: (position, np.asarray(key).tobytes()), TORCH: torch_state}


def _reads_rank(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name in _RUN_ATTRIBUTES and code.co_filename.endswith("lockstep/loop/run.py"):
        return True
    if code.co_name in _RANK_FUNCTIONS:
        return code.co_filename.endswith("torch/distributed/distributed_c10d.py")
    return code is type(os.environ).__getitem__.__code__ and frame.f_locals.get("key") in _VARIABLES
