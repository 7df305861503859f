"""A module that the forward calls twice gets the gradient of both calls, in bfloat16 on several ranks."""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.zoo.loops import Task, contestants, filled, reference
from benchmarks.zoo.program import Program


class Twice(nn.Module):
    """A block that is applied twice, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(torch.tanh(self.block(x)))))


TASK = Task(lambda: filled(Twice()), features=8, lr=1.0, clip=100.0, bf16=True)
PROGRAM = Program(
    report="deepspeedai/DeepSpeed#8224",
    date="2026-08",
    expects="norm and update of one step in bfloat16 with a block that is called twice",
    reported=("deepspeed",),
    reference=partial(reference, TASK),
    contestants=contestants(TASK),
    low=torch.bfloat16,
)
