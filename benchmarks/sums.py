"""What the canonical sum takes at sizes that are no power of two, beside the next one that is, and torch's all-reduce.

Each rank has the vector of one micro-batch, whatever the number of ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.processes import Contestant, Turn, take_turns, timed
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.tree import LeafBlock
from lockstep.device.precision import select_deterministic_kernels

SIZES: Final = {4: (3,), 8: (5, 6, 7)}  # a power of two, and what is compared with it
LENGTHS: Final = {"a bucket": 6 << 20, "a vector of statistics": 2_000}  # numbers in float32
TORCH: Final = "torch all-reduce, {} processes"
OURS: Final = "canonical sum, {} processes"


def results(quick: bool) -> list[Result]:
    """Measure 3 processes beside 4, and 5 to 7 beside 8."""
    cases = [(4, "a vector of statistics")] if quick else [(power, name) for power in SIZES for name in LENGTHS]
    return [_compared(power, name, turns=2 if quick else 15) for power, name in cases]


def _compared(power: int, name: str, turns: int) -> Result:
    length = LENGTHS[name]
    sizes = (*SIZES[power], power)
    contestants = {OURS.format(size): Contestant(partial(_sum, length), size) for size in sizes}
    contestants[TORCH.format(power)] = Contestant(partial(_all_reduce, length), power)
    return compare(
        f"sums-{power}-processes-{length}-numbers",
        f"sums: {name} of {length:,} numbers, one for each process, up to {power} processes",
        "s a sum",
        take_turns(contestants, turns),
        OURS.format(power),
        [Target(OURS.format(size), OURS.format(power), "at most", 1.05) for size in SIZES[power]],
    )


def _sum(length: int, world: World) -> Turn:
    select_deterministic_kernels(num_threads=1)
    canonical = world.make_canonical_sum(Mesh(world.size), "replicate")
    vector = torch.ones(length)
    return timed(lambda: canonical({LeafBlock(world.rank, 1): vector}, world.size, vector), world)


def _all_reduce(length: int, world: World) -> Turn:
    select_deterministic_kernels(num_threads=1)
    vector = torch.zeros(length)
    return timed(lambda: dist.all_reduce(vector), world)
