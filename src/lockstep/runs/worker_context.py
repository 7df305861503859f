"""The context of a worker process in which Lockstep calls a user's function: the ranks, and overriding settings."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from torch import nn

from lockstep.ranks.rendezvous import Rendezvous
from lockstep.reporting.sink import Sink

# Called with the number of a step (from 1), its loss, and a digest of each tensor of the model after the step.
Observe = Callable[[int, float, Mapping[str, str]], None]


class OpenRun(Protocol):
    """A run in a custom training loop. When the function that joined the run returns, the run must be closed."""

    @property
    def _computing(self) -> int:
        """A number that changes when random generators are seeded for a new batch, or 0 if no batch is in progress."""

    @property
    def _model(self) -> nn.Module | None:
        """The placed model, or None before the model is placed."""

    def _is_in(self, folder: str | None) -> bool:
        """Return whether this run uses `folder`, so that a new run can't use it."""

    def _abandon(self) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...


@dataclass(frozen=True)
class WorkerContext:
    """The ranks, which have already joined, and settings that override the arguments of the user's function.

    - `strategy`: Replaces the strategy that the function requests.
    - `folder`: Replaces its run folder. A run without a folder still has no folder, unless it is the first run and
      `keeps` is set.
    - `guarded`: If False, code that makes results depend on the placement isn't rejected (loop/guard.py).
    """

    rendezvous: Rendezvous
    strategy: str | dict[str, Any] | None = None
    folder: Path | None = None
    keeps: bool = False
    observe: Observe | None = None
    sinks: Sequence[Sink] = ()  # sinks of a context with `observe`
    guarded: bool = True
    claimed: Callable[[Path], None] | None = None  # called with the run folder of each run
    runs: list[OpenRun] = field(default_factory=list)


# The context of this process, or None if Lockstep didn't start it to call a user's function.
WORKER_CONTEXT: Final[ContextVar[WorkerContext | None]] = ContextVar("lockstep", default=None)
