"""What a loop of the user's own keeps from one step to the next, in its model and in variables."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random
from typing import Any, Self, final

import numpy as np
from torch import Generator, nn

from lockstep.run.probe.state import Globals, ModelState
from lockstep.run.user_code import own_frames, own_modules, place_of_attribute


@final
class Kept:
    """Taken between two steps. Variables that are set anew in each are no state: what is changed in place is."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = own_modules(())
        self._models = [(model, ModelState(model)) for model in models]
        scopes = [(frame.f_locals, frame.f_code) for frame in own_frames()]
        self._globals = Globals(modules, (), scopes)
        self._variables = {
            f"{name}.{key}": value for name, module in modules.items() for key, value in vars(module).items()
        }
        for variables, _ in scopes:
            self._variables |= variables

    def changes(self, after: Self) -> Mapping[str, str]:
        """Return what is not as it was, and how it changed: with the line where that can be told."""
        found: dict[str, str] = {}
        for (model, before), (_, now) in zip(self._models, after._models, strict=False):
            for name, change in before.attribute_changes(now).items():
                owner, _, attribute = name.rpartition(".")
                where = place_of_attribute(type(model.get_submodule(owner)), attribute)
                found[f"{name} of the model"] = _told(change, where)
            found |= {f"{name} of the model": "a buffer" for name in before.buffer_changes(now)}
        for name, change in self._globals.changes(after._globals).items():
            values = [held[name] for held in (self._variables, after._variables) if name in held]
            same = len(values) == 2 and values[0] is values[1]
            if not values or (same and ("." in name or _is_state(values[1]))):
                found[name.removeprefix("__main__.")] = _told(change, after._globals.place(name))
        return found


def _is_state(value: Any) -> bool:
    """Return whether a local variable may lead from one step to the next: a generator, or what holds more than numbers.

    Numbers, and what adds tensors or its own up, are rather what a loop prints at its end.
    """
    if isinstance(value, dict | list | deque):
        return not all(isinstance(each, int | float) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Generator | np.random.Generator | np.random.RandomState | Random | count)


def _told(change: str, where: str) -> str:
    return f"{change}, {where}" if where else change
