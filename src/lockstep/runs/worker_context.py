"""The context of a worker process in which Lockstep calls a user's function: its ranks, and settings it overrides."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from torch import nn

from lockstep.ranks.rendezvous import Rendezvous
from lockstep.reporting.sink import Sink

# Given a step's number from 1, its loss, and a digest of each of the model's tensors after it.
Observe = Callable[[int, float, Mapping[str, str]], None]


class OpenRun(Protocol):
    """A run that must be closed when the function that joined it returns."""

    @property
    def _computing(self) -> int:
        """0 where no batch is under way, and another number after generators were seeded for another."""

    @property
    def _model(self) -> nn.Module | None:
        """The model that was placed, None before."""

    def _is_in(self, folder: str | None) -> bool:
        """Return whether it is in the way of another run in `folder`."""

    def _abandon(self) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...


@dataclass(frozen=True)
class WorkerContext:
    """The ranks, which have joined already; `strategy` and `folder` replace what the function asks for.

    A run without a folder has none here either, unless it is the first one and the context `keeps` it.

    Unless `guarded`, code that would make the numbers depend on the placement is not refused (loop/guard.py).
    """

    rendezvous: Rendezvous
    strategy: str | dict[str, Any] | None = None
    folder: Path | None = None
    keeps: bool = False
    observe: Observe | None = None
    sinks: Sequence[Sink] = ()  # of one that observes
    guarded: bool = True
    claimed: Callable[[Path], None] | None = None  # called with the folder of each run
    runs: list[OpenRun] = field(default_factory=list)


# That of this process, None where Lockstep did not start it for a function.
WORKER_CONTEXT: Final[ContextVar[WorkerContext | None]] = ContextVar("lockstep", default=None)
