"""Contestants in processes of their own, which wait while the others take their turn.

So nobody pays for what another one imports, allocates or leaves in the caches of the interpreter. Gloo talks over the
loopback interface, each process has one thread, and whatever happens, all of them end.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final

import torch

from lockstep.comm.world import World, open_world
from lockstep.common.follow_parent import die_with_parent
from lockstep.common.rank import RankInfo
from lockstep.ranks.external import join_ranks

TIMEOUT_S: Final = 300.0

Turn = Callable[[], float]  # does the work once and returns the seconds it took
Start = Callable[[World], Turn]  # a function of a module: it is sent to each process


@dataclass(frozen=True)
class Contestant:
    """What is measured: `start` is called once in each of `size` processes."""

    start: Start
    size: int = 1


def timed(do: Callable[[], object], world: World, clock: Callable[[], float] = time.perf_counter) -> Turn:
    """Return a turn that does `do`, which all ranks begin together, and takes its time by `clock`."""

    def turn() -> float:
        world.barrier()
        began = clock()
        do()
        return clock() - began

    return turn


def take_turns(contestants: Mapping[str, Contestant], turns: int) -> dict[str, list[float]]:
    """Let one after the other do its work, again and again, and return the seconds of the slowest process each time.

    A first turn of each, all at once, does not count: it imports, allocates and warms up.
    """
    seconds, _ = take_measured_turns(contestants, turns)
    return seconds


def take_measured_turns(
    contestants: Mapping[str, Contestant], turns: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of `take_turns`, and the CPU seconds of all processes of a contestant together.

    CPU seconds change less than the clock if other processes use the machine.
    """
    with ExitStack() as stack:
        groups = {name: stack.enter_context(_Group(name, each)) for name, each in contestants.items()}
        for group in groups.values():
            group.ask()
        for group in groups.values():
            group.answer()
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(turns):
            for name, group in groups.items():
                group.ask()
                slowest_s, cpu_s = group.answer()
                seconds[name].append(slowest_s)
                cpu_seconds[name].append(cpu_s)
    return seconds, cpu_seconds


class _Group:
    def __init__(self, name: str, contestant: Contestant) -> None:
        self._name = name
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(contestant.size):
            info = RankInfo(rank, contestant.size, rank, contestant.size, "benchmark")
            ours, theirs = context.Pipe()
            arguments = (contestant.start, info, f"file://{self._folder.name}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> _Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def ask(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def answer(self) -> tuple[float, float]:
        """Return the seconds of the slowest process, and the CPU seconds of all."""
        answers = [self._one_answer(pipe) for pipe in self._pipes]
        return max(seconds for seconds, _ in answers), sum(cpu_seconds for _, cpu_seconds in answers)

    def _one_answer(self, pipe: Connection) -> tuple[float, float]:
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"{self._name}: no answer within {TIMEOUT_S:g} s")
        try:
            answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._name}: a process ended before its turn did") from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self._name}:\n{answer}")
        seconds, cpu_seconds = answer
        return float(seconds), float(cpu_seconds)


def _serve(start: Start, info: RankInfo, rendezvous: str, pipe: Connection) -> None:
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers' advice about loaders and loggers
    turn: Turn | None = None
    while True:
        try:
            pipe.recv()
            turn = turn or start(open_world(join_ranks(info, rendezvous, TIMEOUT_S), torch.device("cpu")))
            began = time.process_time()
            seconds = turn()
            pipe.send((seconds, time.process_time() - began))
        except EOFError:
            return
        except Exception:
            pipe.send(traceback.format_exc())
