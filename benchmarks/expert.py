"""What it costs to compute a mixture's experts by groups, and what it saves to share them: time and memory of a step.

The model is transformers' Mixtral with 8 experts of which each token goes to 2; 2 processes have a micro-batch each,
with AdamW. `ddp` has all experts on each process. Time is that of the processor in each rank, of which the most counts,
as for long sequences (context.py); rows on their way are among it, waiting for them is not. No peer stands beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from torch import nn

from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from benchmarks.tensor_learners import HEADS, Work, ours
from lockstep.comm.world import World
from lockstep.device.live_bytes import LiveByteCounter
from lockstep.device.memory import keep_freed_memory
from lockstep.models.find import build_model
from lockstep.models.initialization import initialize_model
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.plan import split_into_chunks

PROCESSES: Final = 2
WHOLE: Final = "ddp"
CUT: Final = "ddp, 2 groups"
SHARED: Final = "expert, 2 groups"


@dataclass(frozen=True)
class Mixture(Work):
    """A Mixtral, whose experts are cut into as many groups as there are chunks."""

    experts: int = 8

    def build(self) -> nn.Module:  # type: ignore[override]
        """Build the model, each time with the same weights."""
        options = {
            "hidden_size": self.width,
            "intermediate_size": 2 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "num_local_experts": self.experts,
            "num_experts_per_tok": 2,
        }
        facts = {"vocabulary": self.vocabulary, "context": self.tokens}
        build = partial(build_model, name="mixtral", source="transformers", options=options, dataset_info=facts)
        model = initialize_model(build, 0)
        if self.chunks > 1:
            plan = {name: kind for name, kind in get_built_in_plan(model).items() if kind == "experts"}
            split_into_chunks(model, plan, self.chunks)
        return model


def results(quick: bool) -> Iterator[Result]:
    """Measure time, then memory."""
    size = (32, 1, 1, 16) if quick else (256, 4, 4, 128)
    work = Mixture(*size, microbatches=PROCESSES)
    described = f"Mixtral of width {work.width}, {work.layers} layers, {work.experts} experts, 2 processes"
    cut = replace(work, chunks=2)
    sides = {WHOLE: ("ddp", work), CUT: ("ddp", cut), SHARED: ("expert", cut)}
    for what, measure, unit, turns, most in (
        ("time", _timed, "s of the processor a step, the largest rank", 7, 1.10),
        ("memory", _measured, "MiB, the largest rank", 3, 0.70),
    ):
        contestants = {name: Contestant(partial(measure, *each), PROCESSES) for name, each in sides.items()}
        yield compare(
            f"expert-{what}-{work.width}",
            f"mixture of experts, {what} of a step: {described}",
            unit,
            take_turns(contestants, 1 if quick else turns),
            WHOLE,
            [Target(SHARED, WHOLE, "at most", most)],
        )


def _timed(strategy: str, work: Mixture, world: World) -> Turn:
    keep_freed_memory()
    return timed(ours(strategy, work, world), world, time.process_time)


def _measured(strategy: str, work: Mixture, world: World) -> Turn:
    ours(strategy, replace(work, width=8 * HEADS, layers=1), world)()  # of a process that has computed nothing yet
    live = LiveByteCounter()
    do = ours(strategy, work, world)
    do()
    return lambda: live.measure_peak(do) / 2**20
