"""A resumed run shares a last, uneven batch as a run without interruption does, and repeats no sample."""

from benchmarks.zoo.program import Program
from benchmarks.zoo.resume import Interrupted, contestants

PLAN = Interrupted(samples=10, batch=2, stop=0, shuffle=False)
PROGRAM = Program(
    report="huggingface/lerobot#4692",
    date="2026-09",
    expects="each of 10 samples once, in batches of 2 on each rank, interrupted after the first",
    reported=("accelerate",),
    reference=PLAN.reference,
    contestants=contestants(PLAN),
)
