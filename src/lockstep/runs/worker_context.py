"""The context for calling a user's function in a worker process: the ranks, and settings that override arguments."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from torch import nn

from lockstep.ranks.rendezvous import Rendezvous
from lockstep.reporting.sink import Sink

# Called after each step with the step number (from 1), the loss, and a digest of each tensor of the model by name.
StepObserver = Callable[[int, float, Mapping[str, str]], None]


class OpenRun(Protocol):
    """A run of a custom training loop that must be closed when the user's function returns."""

    @property
    def _computing(self) -> int:
        """A number that changes whenever generators are seeded for a new batch. 0 if no batch is in progress."""

    @property
    def _model(self) -> nn.Module | None:
        """The placed model, or None before the model is placed."""

    def _uses_folder(self, folder: str | None) -> bool:
        """Return whether this run uses `folder`. If it does, a new run can't use it."""

    def _abandon(self) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...


@dataclass(frozen=True)
class WorkerContext:
    """The ranks, which have already joined, and settings that override arguments in the user's function.

    - `strategy`: Replaces the strategy that the function passes.
    - `folder`: Replaces the run folder that the function passes. If the function passes no folder, the run has none,
      unless it is the first run and `keeps_first_run` is set.
    - `guarded`: If False, code that makes results depend on the placement isn't rejected (loop/guard.py).
    """

    rendezvous: Rendezvous
    strategy: str | dict[str, Any] | None = None
    folder: Path | None = None
    keeps_first_run: bool = False
    observe: StepObserver | None = None
    sinks: Sequence[Sink] = ()  # used if `observe` is set
    guarded: bool = True
    on_claim: Callable[[Path], None] | None = None  # called with the run folder of each run
    runs: list[OpenRun] = field(default_factory=list)


VERIFYING: Final = "LOCKSTEP_VERIFYING"  # set in the environment while `lockstep verify` runs a custom loop
# The context of this process, or None if Lockstep didn't start it to call a user's function.
WORKER_CONTEXT: Final[ContextVar[WorkerContext | None]] = ContextVar("lockstep", default=None)
