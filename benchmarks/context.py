"""What it costs to cut sequences into chunks, and what it saves to share them: time and memory of a whole step.

The model is our GPT with 8 heads; a step is one long sequence, with AdamW. Each process has one thread, and all keep
freed memory. Time is that of the processor in each rank, of which the most counts: what a step takes on a machine that
does nothing else, but for waiting. Memory is what a rank has in use at most in a step (live_bytes.py), from before the
model is built on; a process first trains a small one. Beside it stands the uncut sequence on one process: torch's own
`torch.distributed.tensor.experimental.context_parallel` (2.15) has no strategy for the attention of a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from benchmarks.tensor_learners import DECAY, HEADS, LR, Do
from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainRecipe, PlainSequenceChunks
from lockstep.core.order import Step
from lockstep.device.live_bytes import LiveByteCounter
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels
from lockstep.models.gpt import gpt
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.plan import split_into_chunks
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.language import Language

WHOLE: Final = "whole sequences, 1 process"


@dataclass(frozen=True)
class Work:
    """A GPT, the tokens of its one sequence, and into how many chunks that, and its heads and features, are cut."""

    width: int
    layers: int
    tokens: int
    chunks: int = 1
    features: int = 1

    def build(self) -> nn.Module:
        """Build the model, each time with the same weights."""
        torch.manual_seed(0)
        model = gpt(context=self.tokens, layers=self.layers, heads=HEADS, width=self.width)
        if self.features > 1:
            split_into_chunks(model, get_built_in_plan(model), self.features)
        return model


@dataclass(frozen=True)
class Side:
    """A way to do the work."""

    processes: int
    strategy: str
    work: Work
    options: tuple[tuple[str, bool], ...] = ()


def results(quick: bool) -> Iterator[Result]:
    """Measure time, then memory."""
    work = Work(32, 1, 64) if quick else Work(256, 4, 2048)
    described = f"GPT of width {work.width}, {work.layers} layers, 1 x {work.tokens} tokens"
    cut, both = replace(work, chunks=2), replace(work, chunks=2, features=2)
    sides = {
        WHOLE: Side(1, "single", work),
        "2 chunks, 1 process": Side(1, "single", cut),
        "2 chunks, context on 2": Side(2, "context", cut),
        "2 x 2 chunks, 1 process": Side(1, "single", both),
        "2 x 2 chunks, tensor on 2": Side(2, "tensor", both),
        "2 x 2 chunks, sequence-parallel": Side(2, "tensor", both, (("sequence_parallel", True),)),
    }
    chunks, shared = [*sides][1:3]
    for what, measure, turns, targets in (
        ("time", _timed, 5, [Target(chunks, WHOLE, "at most", 1.10), Target(shared, WHOLE, "at most", 0.70)]),
        ("memory", _measured, 3, [Target(chunks, WHOLE, "at most", 1.20), Target(shared, WHOLE, "at most", 0.70)]),
    ):
        contestants = {name: Contestant(partial(measure, each), each.processes) for name, each in sides.items()}
        yield compare(
            f"context-{what}-{work.tokens}",
            f"long sequences, {what} of a step: {described}",
            "s of the processor a step, the largest rank" if what == "time" else "MiB, the largest rank",
            take_turns(contestants, 1 if quick else turns),
            WHOLE,
            targets,
        )


def stepping(side: Side, world: World) -> Do:
    """Return what does a step under one of our strategies."""
    select_deterministic_kernels(num_threads=1)
    work = side.work
    kind: Any = import_module(f"lockstep.strategies.{side.strategy}").Strategy(**dict(side.options))
    engine = kind.start(
        Problem(Language(), work.build),
        lambda trained, _: make_optimizer(trained, name="AdamW", lr=LR, weight_decay=DECAY),
        world,
        Numerics(PlainRecipe(microbatches=1, model=PlainSequenceChunks(work.chunks))),
    )
    ids = torch.randint(256, (1, work.tokens + 1), generator=torch.Generator().manual_seed(0))
    step = Step(0, 0, 0, 1, 0, False, total_weight=work.tokens)

    def do() -> object:
        sums = engine.forward_backward([MicroBatch(0, ids, 1, work.tokens)], step)
        engine.update(LR, None)
        return sums.loss

    return do


def _timed(side: Side, world: World) -> Turn:
    keep_freed_memory()
    return timed(stepping(side, world), world, time.process_time)


def _measured(side: Side, world: World) -> Turn:
    stepping(replace(side, work=replace(side.work, width=8 * HEADS, layers=1, tokens=64)), world)()
    live = LiveByteCounter()
    do = stepping(side, world)
    do()
    return lambda: live.measure_peak(do) / 2**20
