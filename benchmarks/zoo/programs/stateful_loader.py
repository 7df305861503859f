"""A loader that saves its state restores the shuffle, and not only the position."""

from benchmarks.zoo.program import Program
from benchmarks.zoo.resume import Interrupted, contestants

PLAN = Interrupted(epochs=2, epoch=1, stop=2, stateful=True)
PROGRAM = Program(
    report="huggingface/accelerate#4195",
    date="2026-08",
    expects="each of 64 shuffled samples twice in 2 epochs, the second interrupted after 3 of 8 steps; 2 orders",
    reported=("accelerate",),
    reference=PLAN.reference,
    contestants=contestants(PLAN),
    needs=("torchdata",),
)
