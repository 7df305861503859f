"""A run that is killed within an epoch trains on the rest of this epoch."""

from benchmarks.zoo.program import Program
from benchmarks.zoo.resume import Interrupted, contestants

PLAN = Interrupted(stop=2)
PROGRAM = Program(
    report="wyim-pgl/transgenic#59",
    date="2026-09",
    expects="each of 64 shuffled samples once in an epoch that was interrupted after 3 of 8 steps",
    reported=("accelerate",),
    reference=PLAN.reference,
    contestants=contestants(PLAN),
)
