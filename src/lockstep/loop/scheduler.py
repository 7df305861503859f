"""A learning rate scheduler of torch's kind in a loop of the user's own.

The loop steps it where it always did. An update takes the rates that it has set, checkpoints keep what it counts, and a
resumed run gets that back.
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
    """The user's scheduler of their optimizer's rates."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        if not isinstance(scheduler, LRScheduler):
            what = type(scheduler).__name__
            raise refusal(f"run.place: the scheduler is a {what}", "give one of torch.optim.lr_scheduler's kind")
        if scheduler.optimizer is not optimizer:
            raise refusal("run.place: the scheduler is of another optimizer", "make it of the one that is placed")
        if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            raise refusal("run.place: a scheduler of an optimizer whose lr is a tensor", "give it a number as lr")
        if unknown := [*_unknown("", scheduler.state_dict())]:
            raise refusal(
                f"run.place: the scheduler holds what no checkpoint can: {', '.join(unknown)}",
                "use one of torch.optim.lr_scheduler's, such as SequentialLR, or step.update(lr=...)",
            )
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._saved: Any = None  # its state, where this step was saved
        self.made = self.state()  # as it was when the run began

    @property
    def name(self) -> str:
        """The class, which a resumed run has to have alike."""
        return f"{type(self._scheduler).__module__}.{type(self._scheduler).__qualname__}"

    @property
    def rate(self) -> float:
        """The rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def state(self) -> Any:
        """Return what it counts, ready for JSON."""
        return _plain(self._scheduler.state_dict())

    def load(self, saved: Any, made: Any) -> list[str]:
        """Take over what `state` returned of one whose state was `made` at first; return what is made otherwise here.

        What was saved holds for that, too.
        """
        self._scheduler.load_state_dict(_restored(self._scheduler.state_dict(), saved))
        now, self.made = self.made, made or self.made  # checkpoints of earlier versions lack it
        other = [name for name in now if now[name] != self.made.get(name)]
        return [name for name in other if not name.startswith("_")] or (["schedule"] if other else [])

    def note_update(self) -> None:
        """Let it know that there was an update, before which it should not be stepped."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._saved = None

    def note_save(self) -> None:
        """Keep what was saved, for `check_saved`."""
        self._saved = self.state()

    def check_saved(self, step: int) -> None:
        """Raise UsageError where it was stepped after a save: a resumed run would begin without that."""
        if self._saved not in (None, self.state()):
            raise refusal(
                f"step {step}: scheduler.step() after run.save, so that a resumed run would leave it out",
                "step the scheduler first, and save then",
            )


def _unknown(name: str, value: Any) -> Iterator[str]:
    """Yield the names of what is no number, text or function in a state."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _unknown(f"{name}.{key}" if name else str(key), each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _unknown(name, each)
    elif isinstance(value, LRScheduler) or not (isinstance(value, int | float | str | None) or callable(value)):
        yield name


def _plain(value: Any) -> Any:
    """Return a state as JSON can hold it; functions stay with the script."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def _restored(now: Any, saved: Any) -> Any:
    """Return a state in which all is as it was saved; what is the same already stays the object that it is."""
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
    raise UsageError(f"the scheduler has {now!r}, and had {saved!r}; make it as it was, or choose another dir")
