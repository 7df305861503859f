"""Worker processes for benchmarks: gloo over loopback, one thread each, and a time limit on everything."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from lockstep.core.rank import RankInfo
from lockstep.runtime.world import World, open_world

TIMEOUT_S = 300.0

Measure = Callable[..., list[float]]


def run(size: int, measure: Measure, *arguments: Any) -> list[float]:
    """Return what rank 0's `measure(world, *arguments)` returns; all ranks run it."""
    with tempfile.TemporaryDirectory() as folder:
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(_work, (size, f"file://{folder}/store", answers, measure, arguments), nprocs=size)
        figures: list[float] = answers.get()
        return figures


def slowest(seconds: float) -> float:
    """Return the longest time that any rank took, on all ranks."""
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def _work(rank: int, size: int, store: str, answers: Any, measure: Measure, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    info = RankInfo(rank, size, rank, size, "benchmark")
    world: World = open_world(info, "cpu", store, timedelta(seconds=TIMEOUT_S).total_seconds())
    figures = measure(world, *arguments)
    if rank == 0:
        answers.put(figures)
    world.close()
