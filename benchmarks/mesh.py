"""A mesh of two axes beside the same composition by hand: rows shared along one, layers along the other.

Four processes train our GPT with 8 heads (tensor_learners.py): two next to each other share the layers, and each such
pair has a micro-batch of its own and half of the rows of parameters, gradients and optimizer state. By hand that is
parallelize_module and then fully_shard over the two axes of a DeviceMesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from benchmarks.processes import Contestant, take_turns
from benchmarks.report import Result, Target, compare
from benchmarks.tensor import MOST, described
from benchmarks.tensor_learners import SLICES, Work, composed, memory_of_step, ours, time_of_step

SIZE: Final = 4
TORCH: Final = "torch's composition"
MESH: Final = "lockstep mesh"


def results(quick: bool) -> Iterator[Result]:
    """Measure time, then memory."""
    works = [Work(32, layers=1, tokens=16)] if quick else [Work(width, layers=2) for width in (384, 768)]
    for what, start, unit, turns in (
        ("time", time_of_step, "s a step", 15),
        ("memory", memory_of_step, "MiB, the largest rank", 5),
    ):
        for work in works:
            cut = replace(work, chunks=SLICES, microbatches=SIZE // SLICES)
            options = {"shard": SIZE // SLICES, "tensor": SLICES}
            sides = {
                TORCH: partial(start, composed, work),
                MESH: partial(start, partial(ours, "mesh", options=options), cut),
            }
            yield compare(
                f"mesh-{what}-{work.width}",
                f"mesh of 2 x 2, {what} of a step: {described(work)} in each of 2 micro-batches, {SIZE} processes",
                unit,
                take_turns({name: Contestant(each, SIZE) for name, each in sides.items()}, 2 if quick else turns),
                TORCH,
                [Target(MESH, TORCH, "at most", MOST)],
            )
