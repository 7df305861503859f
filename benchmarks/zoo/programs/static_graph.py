"""All ranks have one model after training with `static_graph=True`."""

from functools import partial

from benchmarks.zoo.loops import Task, contestants, reference, trainer
from benchmarks.zoo.program import Program

TASK = Task(samples=16, ddp={"static_graph": True}, strategy="ddp")
PROGRAM = Program(
    report="Lightning-AI/pytorch-lightning#20704",
    date="2025-04",
    expects="the update of 2 steps, on all ranks",
    reported=("lightning",),
    reference=partial(reference, TASK),
    contestants=contestants(
        TASK,
        fsdp2="has no static graph",
        lightning=partial(trainer, TASK),
        deepspeed="has no static graph",
    ),
)
