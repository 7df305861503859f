"""Checks for code that a resumed script runs again: before the first loop, and after loops that were complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, final

from lockstep.common.user_code import make_refusal
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.state import ScriptState, compute_state_digests

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code

_ADVICE: Final = (
    "use one loop over all steps, with `if step.every(epochs=1):` for the work at the end of an epoch, or skip this "
    "code if an entry in run.state says that it is done"
)


@final
class RerunCheck:
    """Checks that code doesn't change what the checkpoint restored, if the code ran before the save.

    A resumed script skips the steps of complete loops, but not the code before and after these loops. Such code is
    correct if it has no effect a second time, for example because it first looks for its entry in `run.state`.
    """

    def __init__(self, state: ScriptState, warn: Callable[[str], None]) -> None:
        self._state = state
        self._warn = warn
        self._restored_state: dict[str, Any] = {}  # the values of `run.state` by their display name, before all loops
        self._restored: dict[str, Any] | None = None  # all restored values, after a loop that was complete

    def begin_script(self) -> None:
        """Begin to check the code before the first loop. Call this method after the checkpoint is loaded."""
        self._restored_state = self._collect_state()

    def check_script(self) -> None:
        """Warn if the code before the first loop changed a restored value of `run.state`."""
        restored, self._restored_state = self._restored_state, {}
        values = self._collect_state() if restored else {}
        if (changed := next((name for name in restored if restored[name] != values.get(name)), None)) is not None:
            container, _, key = changed.partition("[")
            self._warn(
                f"{changed} was restored from the checkpoint, but changed before the first loop over run.steps; to set "
                f"an initial value, write {container}.setdefault({key.partition(']')[0]}, ...)"
            )

    def begin(self, placed: PlacedModel) -> None:
        """Begin to check code that runs again. Call this method at a loop that was complete before the save."""
        self._restored = self._collect_values(placed)

    def check(self, placed: PlacedModel) -> None:
        """Raise UsageError if the code that ran since `begin` changed a value. No-op if `begin` wasn't called."""
        restored, self._restored = self._restored, None
        if restored is None:
            return
        values = self._collect_values(placed)
        changed = next((name for name in {**restored, **values} if restored.get(name) != values.get(name)), None)
        if changed is not None:
            raise make_refusal(
                f"{changed} changed after a loop over run.steps that was complete before the run resumed, so this "
                f"change was made twice",
                _ADVICE,
            )

    def _collect_values(self, placed: PlacedModel) -> dict[str, Any]:
        changes = placed.collect_changes()
        return {
            **self._collect_state(),
            "the scheduler": changes["scheduler"],
            "a setting of an optimizer group": changes["settings"],
        }

    def _collect_state(self) -> dict[str, Any]:
        plain, tensors = self._state.split()
        named_values = {f"run.state[{json.dumps(name)}]": value for name, value in plain.items()}
        return {**named_values, **compute_state_digests(tensors)}
