"""A run that is killed after the last step of an epoch trains on the whole next epoch."""

from benchmarks.zoo.program import Program
from benchmarks.zoo.resume import Interrupted, contestants

PLAN = Interrupted(epochs=2, epoch=0, stop=7, stateful=True)
PROGRAM = Program(
    report="verl-project/verl#7401",
    date="2026-08",
    expects="each of 64 samples twice in 2 epochs, interrupted after the last of 8 steps of the first; 2 orders",
    reported=("ddp",),
    reference=PLAN.reference,
    contestants=contestants(PLAN),
    needs=("torchdata",),
)
