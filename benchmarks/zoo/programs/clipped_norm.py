"""The norm that clipping uses is that of all shards together."""

from functools import partial

from benchmarks.zoo.loops import Task, contestants, reference
from benchmarks.zoo.program import Program

TASK = Task(samples=24, clip=0.1, strategy="zero3", stage=3)
PROGRAM = Program(
    report="pytorch/pytorch#170862",
    date="2025-12",
    expects="the norms of 3 clipped steps, and their update",
    reported=("fsdp2",),
    reference=partial(reference, TASK),
    contestants=contestants(TASK),
)
