"""Finds the source lines that read values that differ between processes or calls: clocks, ranks, random numbers.

A profiler is called for each function call, and a tracer for each executed line outside of libraries. Both make a
forward pass several times slower, so they are only used if there is a difference to explain.
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

from lockstep.common.user_code import format_location, is_installed
from lockstep.setup.user_code import find_frame_line, is_library_file

CLOCK: Final = "the clock"
SYSTEM: Final = "the system's randomness"
PROCESS: Final = "the process id"
HOST: Final = "the host name"
RANK: Final = "the rank or the number of ranks"
PYTHON: Final = "Python's"  # names of random number generators
NUMPY: Final = "NumPy's"
TORCH: Final = "torch's"

_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_RUN_ATTRIBUTES: Final = ("rank", "size")  # attributes of lockstep's Run
_RANK_FUNCTIONS: Final = ("get_rank", "get_world_size", "get_node_local_rank")  # functions of torch.distributed


@contextmanager
def record_reads(get_batch_id: Callable[[], int] = lambda: 1) -> Iterator[Mapping[str, str]]:
    """Record the nondeterministic values that the `with` block reads. Yield a dict that maps them to source lines.

    The keys of the dict are constants of this module, such as CLOCK, or NUMPY for a draw from NumPy's generator.

    `get_batch_id` returns an ID of the current batch, or 0 between batches. Between batches, only reads of the rank and
    the world size are recorded. Lockstep seeds the random number generators for each batch, so a changed generator
    state isn't recorded if the batch ID has changed too.
    """
    reads: dict[str, str] = {}
    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(_CallRecorder(reads, get_batch_id).record_call)
    sys.settrace(_RandomCallTracer(reads, get_batch_id).trace_call)
    try:
        yield reads
    finally:
        sys.settrace(before[1])
        sys.setprofile(before[0])


@final
class _CallRecorder:
    """A profiler that records calls to functions whose results depend on the process or the time."""

    def __init__(self, reads: dict[str, str], get_batch_id: Callable[[], int]) -> None:
        self._reads = reads
        self._get_batch_id = get_batch_id
        clocks = (time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns)
        dates = (datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today)
        self._names: dict[Any, str] = {
            **dict.fromkeys((*clocks, *dates, time.localtime, time.gmtime, time.process_time), CLOCK),
            **dict.fromkeys((os.urandom, os.getrandom), SYSTEM),
            os.getpid: PROCESS,
            socket.gethostname: HOST,
        }

    def record_call(self, frame: FrameType, event: str, function: Any) -> None:
        source, reader = None, frame
        if event == "c_call":
            source = self._names.get(function)
        elif event == "call" and _reads_rank(frame):
            source, reader = RANK, frame.f_back or frame
        if source is not None and (source == RANK or self._get_batch_id()) and (location := find_frame_line(reader)):
            self._reads.setdefault(source, location)


@final
class _RandomCallTracer:
    """A tracer that records the source lines at which the state of a random number generator changes.

    A profiler can't find these lines, because Python doesn't call it for the functions of NumPy's generator.
    """

    def __init__(self, reads: dict[str, str], get_batch_id: Callable[[], int]) -> None:
        self._reads = reads
        self._get_batch_id = get_batch_id
        self._frames: list[tuple[FrameType, int]] = []  # stack of traced frames, each with its current line
        self._last_batch_id = get_batch_id()  # ID of the batch at the last check
        # The states of the random number generators at the last check.
        self._states: dict[str, Any] = self._get_current_states() if self._last_batch_id else {}

    def trace_call(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        # Skip known libraries. Trace other installed packages only within a batch, not while they are imported.
        if event != "call" or is_library_file(file) or (is_installed(file) and not self._get_batch_id()):
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
        """Record the current source line if a generator state has changed since the last check.

        Changes are only recorded while traced code is running.
        """
        before, self._last_batch_id = self._last_batch_id, self._get_batch_id()
        if self._last_batch_id != before:
            self._states = {}
        if not self._last_batch_id:
            return
        states = self._get_current_states()
        for name in [name for name, state in self._states.items() if states[name] != state] if self._frames else []:
            frame, line = self._frames[-1]
            self._reads.setdefault(name, format_location(frame.f_code.co_filename, line))
        self._states = states

    def _get_current_states(self) -> dict[str, Any]:
        _, key, position, *_rest = np.random.get_state(legacy=True)
        torch_state = torch.get_rng_state().numpy().tobytes()
        return {PYTHON: python_random.getstate(), NUMPY: (position, np.asarray(key).tobytes()), TORCH: torch_state}


def _reads_rank(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name in _RUN_ATTRIBUTES and code.co_filename.endswith("lockstep/loop/run.py"):
        return True
    if code.co_name in _RANK_FUNCTIONS:
        return code.co_filename.endswith("torch/distributed/distributed_c10d.py")
    return code is type(os.environ).__getitem__.__code__ and frame.f_locals.get("key") in _RANK_VARIABLES
