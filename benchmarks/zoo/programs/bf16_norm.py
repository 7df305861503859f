"""The norm of a step in bfloat16 without ZeRO is that of its own gradients."""

from functools import partial

import torch

from benchmarks.zoo.loops import Task, contestants, reference
from benchmarks.zoo.program import Program

TASK = Task(samples=24, clip=100.0, lr=0.5, bf16=True, stage=0, strategy="ddp")
PROGRAM = Program(
    report="deepspeedai/DeepSpeed#7837",
    date="2026-02",
    expects="the norms of 3 steps in bfloat16 with whole weights on each rank, and their update",
    reported=("deepspeed",),
    reference=partial(reference, TASK),
    contestants=contestants(TASK),
    low=torch.bfloat16,
)
