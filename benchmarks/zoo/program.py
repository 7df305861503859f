"""A program of the zoo: a bug report, the computation that it expects, and one function for each contestant.

A contestant's function runs on every rank and returns named tensors. `reference` computes the same names in plain
PyTorch on one process. A tuple of functions runs one after the other, each in new processes, in one folder. A string
instead of a function says why the report does not apply to a contestant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

Numbers = dict[str, Tensor]
Function = Callable[[], Numbers]
Phases = tuple[Function, ...]

CONTESTANTS: Final = ("ddp", "fsdp2", "accelerate", "lightning", "deepspeed", "lockstep")


@dataclass(frozen=True)
class Program:
    """A report and its program.

    `report` is `owner/repository#number`, `kind` is `issues` or `pull`. `reported` are the contestants that the report
    is about. `low` is the lower precision of the reference: the tolerance is the distance that it has from float64.
    `needs` are packages that the program uses besides those of its contestants.
    """

    report: str
    date: str
    expects: str
    reported: tuple[str, ...]
    reference: Function
    contestants: Mapping[str, Function | Phases | str]
    kind: str = "issues"
    world: int = 2
    limit_s: float = 90.0
    low: torch.dtype = torch.float32
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if missing := set(CONTESTANTS).symmetric_difference(self.contestants):
            raise ValueError(
                f"{self.report}: expected one entry for each contestant, got {sorted(missing)} too many or few"
            )

    @property
    def url(self) -> str:
        """The address of the report."""
        repository, _, number = self.report.partition("#")
        return f"https://github.com/{repository}/{self.kind}/{number}"

    def phases(self, contestant: str) -> Phases:
        """Return the functions of a contestant; none if the report does not apply to it."""
        entry = self.contestants[contestant]
        if isinstance(entry, str):
            return ()
        return entry if isinstance(entry, tuple) else (entry,)
