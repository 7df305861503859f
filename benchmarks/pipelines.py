"""A pipeline by hand with torch.distributed.pipelining, on the stages that ours cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn import functional as F

from lockstep.parallel.pipeline.cut import build_stage_module, find_cut

SAMPLE: Final = (3, 32, 32)
# Torch's schedule, whether it takes a list of stages, and how many there are on each rank.
SCHEDULES: Final[Mapping[str, tuple[Callable[..., Any], bool, int]]] = {
    "1f1b": (Schedule1F1B, False, 1),
    "gpipe": (ScheduleGPipe, False, 1),
    "interleaved": (ScheduleInterleaved1F1B, True, 2),
    "zero_bubble": (ScheduleInterleavedZeroBubble, True, 2),
}


class _Stage(nn.Module):
    """A stage with a tensor for a list of one."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, values: Tensor) -> Tensor:
        [output] = self.stage(values)
        result: Tensor = output
        return result


def pipelined(
    schedule: str, model: nn.Module, microbatches: int, rank: int, ranks: int
) -> tuple[nn.Module, Callable[[Tensor, Tensor], object]]:
    """Return this rank's part of `model`, and what does a forward and a backward of a batch and its targets."""
    kind, several, each = SCHEDULES[schedule]
    cut = find_cut(model, ranks * each, (torch.empty(2, *SAMPLE, device="meta"),))
    numbers = range(rank, ranks * each, ranks)
    parts = nn.ModuleList([_Stage(build_stage_module(model.train(), cut, number)) for number in numbers])
    device = torch.device("cpu")
    stages = [PipelineStage(part, number, ranks * each, device) for part, number in zip(parts, numbers, strict=True)]
    run = kind(stages if several else stages[0], microbatches, loss_fn=F.cross_entropy)

    def do(inputs: Tensor, targets: Tensor) -> object:
        given = (inputs,) if rank == 0 else ()
        return run.step(*given, target=targets if rank == ranks - 1 else None)

    return parts, do
