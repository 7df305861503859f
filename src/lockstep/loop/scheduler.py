"""Supports PyTorch's learning rate schedulers in a custom loop.

The loop steps the scheduler as usual. Each update uses the learning rates that the scheduler has set. Checkpoints save
the state of the scheduler, and a resumed run restores it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.common.user_code import make_refusal
from lockstep.errors import UsageError

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class UserScheduler:
    """Wraps the user's learning rate scheduler."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        if not isinstance(scheduler, LRScheduler):
            raise make_refusal(
                f"run.place: expected a scheduler of torch.optim.lr_scheduler, got a {type(scheduler).__name__}",
                "pass one, or set the rate with step.update(lr=...)",
            )
        if scheduler.optimizer is not optimizer:
            raise make_refusal(
                "run.place: the scheduler belongs to a different optimizer",
                "create it with the optimizer that you pass to run.place",
            )
        if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            raise make_refusal(
                "run.place: a scheduler is not supported with a tensor lr", "pass a number as lr to the optimizer"
            )
        if unsupported := [*_find_unsupported_names("", scheduler.state_dict())]:
            raise make_refusal(
                f"run.place: a checkpoint cannot hold these values of the scheduler: {', '.join(unsupported)}",
                "use a scheduler of torch.optim.lr_scheduler, such as SequentialLR, or step.update(lr=...)",
            )
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._saved: Any = None  # the state at the save in this step, if any
        self.initial_state = self.get_state()  # the state at the start of the run

    @property
    def name(self) -> str:
        """The qualified name of the scheduler class, which must be the same in a resumed run."""
        return f"{type(self._scheduler).__module__}.{type(self._scheduler).__qualname__}"

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def get_state(self) -> Any:
        """Return the state of the scheduler as JSON-serializable values."""
        return _to_json(self._scheduler.state_dict())

    def load(self, saved_state: Any, saved_initial_state: Any) -> list[str]:
        """Load the state from a checkpoint, and return the names of the settings that the user has changed since then.

        The saved settings override the changed ones. `saved_initial_state` is the state that the scheduler had at the
        start of the run that saved the checkpoint.
        """
        self._scheduler.load_state_dict(_merge_state(self._scheduler.state_dict(), saved_state))
        # Checkpoints of earlier Lockstep versions have no initial state.
        own_initial_state, self.initial_state = self.initial_state, saved_initial_state or self.initial_state
        changed_names = [name for name in own_initial_state if own_initial_state[name] != self.initial_state.get(name)]
        return [name for name in changed_names if not name.startswith("_")] or (["schedule"] if changed_names else [])

    @property
    def has_moved(self) -> bool:
        """Whether the script has stepped the scheduler since the start of the run."""
        return bool(self.get_state() != self.initial_state)

    def record_update(self) -> None:
        """Record that there was an update, because PyTorch warns if a scheduler is stepped before the first update."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._saved = None

    def record_save(self) -> None:
        """Record the state that a checkpoint saves, for `check_saved`."""
        self._saved = self.get_state()

    def check_saved(self, step: int) -> None:
        """Raise UsageError if the scheduler was stepped after a save in this step.

        A resumed run would lose this call to `scheduler.step()`.
        """
        if self._saved not in (None, self.get_state()):
            raise make_refusal(
                f"step {step}: scheduler.step() was called after run.save, so a resumed run would lose this call",
                "call scheduler.step() before run.save",
            )


def _find_unsupported_names(name: str, value: Any) -> Iterator[str]:
    """Yield the names of the values in a scheduler state that aren't numbers, strings or functions."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_unsupported_names(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find_unsupported_names(name, item)
    elif isinstance(value, LRScheduler) or not (isinstance(value, int | float | str | None) or callable(value)):
        yield name


def _to_json(value: Any) -> Any:
    """Convert a scheduler state to JSON-serializable values. A function is replaced by the name of its type."""
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def _merge_state(current: Any, saved: Any) -> Any:
    """Merge saved JSON values into the current scheduler state. Current values that equal the saved values are kept."""
    if _to_json(current) == saved:
        return current
    if isinstance(current, Mapping) and isinstance(saved, dict) and {*map(str, current)} == {*saved}:
        return {name: _merge_state(item, saved[str(name)]) for name, item in current.items()}
    if isinstance(current, list | tuple) and isinstance(saved, list) and len(current) == len(saved):
        return type(current)(map(_merge_state, current, saved))
    if isinstance(current, float) and isinstance(saved, str):
        return float(saved)
    if isinstance(current, int | float | None) and isinstance(saved, int | float | None):
        return saved
    raise UsageError(
        f"run.place: the scheduler has {current!r}, but {saved!r} was saved; create it as before, or choose a "
        f"different dir"
    )
