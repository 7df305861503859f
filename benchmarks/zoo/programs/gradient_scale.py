"""Gradients of sharded parameters are the mean over the ranks, with gloo too."""

from functools import partial

from benchmarks.zoo.loops import Task, contestants, reference
from benchmarks.zoo.program import Program

TASK = Task(strategy="zero3", stage=3)
PROGRAM = Program(
    report="pytorch/pytorch#162338",
    date="2025-09",
    expects="one SGD step of 8 samples moves the weights by the mean gradient",
    reported=("fsdp2",),
    reference=partial(reference, TASK),
    contestants=contestants(TASK),
)
