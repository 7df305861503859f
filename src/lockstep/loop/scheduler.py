"""A learning rate scheduler of PyTorch in a custom loop.

The loop steps the scheduler as usual. Each update uses the rates that the scheduler has set. Checkpoints save the state
of the scheduler, and a resumed run restores it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.common.own_code import refusal
from lockstep.errors import UsageError

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours


@final
class OwnScheduler:
    """The user's scheduler for the learning rates of their optimizer."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        if not isinstance(scheduler, LRScheduler):
            raise refusal(
                f"run.place: expected a scheduler of torch.optim.lr_scheduler, got a {type(scheduler).__name__}",
                "pass one, or set the rate with step.update(lr=...)",
            )
        if scheduler.optimizer is not optimizer:
            raise refusal(
                "run.place: the scheduler belongs to a different optimizer",
                "create it with the optimizer that you pass to run.place",
            )
        if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            raise refusal(
                "run.place: a scheduler is not supported with a tensor lr", "pass a number as lr to the optimizer"
            )
        if unknown := [*_unknown("", scheduler.state_dict())]:
            raise refusal(
                f"run.place: a checkpoint cannot hold these values of the scheduler: {', '.join(unknown)}",
                "use a scheduler of torch.optim.lr_scheduler, such as SequentialLR, or step.update(lr=...)",
            )
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._saved: Any = None  # the state at the save in this step, if any
        self.made = self.state()  # the state at the start of the run

    @property
    def name(self) -> str:
        """The class of the scheduler, which must be the same in a resumed run."""
        return f"{type(self._scheduler).__module__}.{type(self._scheduler).__qualname__}"

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def state(self) -> Any:
        """Return the state of the scheduler, ready for JSON."""
        return _plain(self._scheduler.state_dict())

    def load(self, saved: Any, made: Any) -> list[str]:
        """Load the state that `state` returned, and return the names of settings that differ from the saved ones.

        `made` is the state that the saved scheduler had at first. The saved settings replace the different ones.
        """
        self._scheduler.load_state_dict(_restored(self._scheduler.state_dict(), saved))
        now, self.made = self.made, made or self.made  # checkpoints of earlier versions don't have `made`
        other = [name for name in now if now[name] != self.made.get(name)]
        return [name for name in other if not name.startswith("_")] or (["schedule"] if other else [])

    def note_update(self) -> None:
        """Tell the scheduler that there was an update. It warns if it is stepped before the first update."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._saved = None

    def note_save(self) -> None:
        """Note the saved state for `check_saved`."""
        self._saved = self.state()

    def check_saved(self, step: int) -> None:
        """Raise UsageError if the scheduler was stepped after a save, because a resumed run would lose this step."""
        if self._saved not in (None, self.state()):
            raise refusal(
                f"step {step}: scheduler.step() was called after run.save, so a resumed run would lose it",
                "call scheduler.step() before run.save",
            )


def _unknown(name: str, value: Any) -> Iterator[str]:
    """Yield the names of values in a state that aren't numbers, text or functions."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _unknown(f"{name}.{key}" if name else str(key), each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _unknown(name, each)
    elif isinstance(value, LRScheduler) or not (isinstance(value, int | float | str | None) or callable(value)):
        yield name


def _plain(value: Any) -> Any:
    """Return a state that JSON can hold. Functions stay in the script."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def _restored(now: Any, saved: Any) -> Any:
    """Return a state with the saved values. Objects with the same value already are kept."""
    if _plain(now) == saved:
        return now
    if isinstance(now, Mapping) and isinstance(saved, dict) and {*map(str, now)} == {*saved}:
        return {name: _restored(each, saved[str(name)]) for name, each in now.items()}
    if isinstance(now, list | tuple) and isinstance(saved, list) and len(now) == len(saved):
        return type(now)(map(_restored, now, saved))
    if isinstance(now, float) and isinstance(saved, str):
        return float(saved)
    if isinstance(now, int | float | None) and isinstance(saved, int | float | None):
        return saved
    raise UsageError(
        f"run.place: the scheduler has {now!r}, but {saved!r} was saved; create it as before, or choose a different dir"
    )
