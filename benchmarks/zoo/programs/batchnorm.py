"""The running mean of BatchNorm counts the samples of all ranks."""

from torch import nn

from benchmarks.zoo.loops import Task, contestants, filled
from benchmarks.zoo.program import Numbers, Program


def build() -> nn.Module:
    """Return a layer of BatchNorm and a linear one."""
    return filled(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))


def reference() -> Numbers:
    """Pass all samples of the step through the model at once."""
    model = build()
    model(TASK.dataset().tensors[0])
    return {"0.running_mean": model.get_buffer("0.running_mean")}


TASK = Task(build, buffers=True, strategy="ddp", stage=1)
PROGRAM = Program(
    report="ultralytics/ultralytics#24410",
    date="2026-05",
    expects="the running mean after one step of 8 samples, 4 on each rank",
    reported=("ddp",),
    reference=reference,
    contestants=contestants(TASK),
)
