"""A loop that communicates gradients in the first micro-batch of a step, and updates after the last."""

import os
from functools import partial

import torch

from benchmarks.zoo.loops import Task, contestants, reference
from benchmarks.zoo.program import Numbers, Program

TASK = Task(batch=8, micro=2, synced=lambda number, count: (number - 1) % count == 0, stage=1)


def lockstep() -> Numbers:
    """Call update where the loop had its condition."""
    import lockstep as library

    with library.join(seed=0) as run:
        model = TASK.build()
        model, _ = run.place(model, TASK.sgd(model), strategy="ddp")
        for step in run.steps(TASK.dataset(), batch=8, microbatches=4, epochs=1, order="sequential"):
            for number, (x, y) in enumerate(step):
                step.backward(mean=TASK.loss(model(x), y))
                if number % 2 == 0:
                    step.update()
    raise AssertionError(f"rank {os.environ['RANK']}: the loop was accepted, {torch.get_default_dtype()}")


PROGRAM = Program(
    report="modelscope/FunASR#3472",
    kind="pull",
    date="2026-08",
    expects="the update of a step of 2 micro-batches on each rank, on all ranks",
    reported=("ddp",),
    reference=partial(reference, TASK),
    contestants=contestants(
        TASK,
        accelerate="accumulate() decides which micro-batch communicates; the loop has no condition to get wrong",
        lockstep=lockstep,
    ),
)
