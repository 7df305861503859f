"""Epochs differ in their order, also after a resume in a later epoch."""

from benchmarks.zoo.program import Program
from benchmarks.zoo.resume import Interrupted, contestants

PLAN = Interrupted(epochs=3, epoch=2, stop=2)
PROGRAM = Program(
    report="pytorch/torchtitan#2864",
    date="2026-04",
    expects="each of 64 samples three times in 3 epochs, the third interrupted after 3 of 8 steps; 3 orders",
    reported=("ddp",),
    reference=PLAN.reference,
    contestants=contestants(PLAN),
)
