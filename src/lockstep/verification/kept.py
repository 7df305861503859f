"""What a loop of the user's own keeps from one step to the next, in its model and in variables."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from types import CodeType, ModuleType
from typing import Any, Final, Self, final

import numpy as np
from torch import Generator, Tensor, nn

from lockstep.probe.state import Globals, ModelState, change_of
from lockstep.setup.user_code import is_carried, own_frames, own_modules, place_of_attribute
from lockstep.training.checkpoint.tensorfile import digest

_OF_MODEL: Final = " of the model"
_MODE: Final = "the mode of "
_MAIN: Final = "__main__."


@final
class Kept:
    """The state of a loop between two steps.

    Variables that each step sets anew are no state. Those that are changed in place are, and so are tensors that a step
    reads before it sets them, as the hidden state of an RNN that is carried from batch to batch.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = own_modules(())
        self._models = [(model, ModelState(model)) for model in models]
        scopes = [(frame.f_locals, frame.f_code) for frame in own_frames()]
        self._globals = Globals(modules, (), scopes)
        self._variables: dict[str, Any] = {}
        self._scopes: dict[str, ModuleType | CodeType] = {}
        for module_name, module in modules.items():
            for key, value in vars(module).items():
                self._variables[f"{module_name}.{key}"] = value
                self._scopes[f"{module_name}.{key}"] = module
        for variables, code in scopes:
            self._variables |= variables
            self._scopes |= dict.fromkeys(variables, code)

    def changes(self, after: Self) -> Mapping[str, str]:
        """Return what is not as it was, and how it changed: with the line where that can be told."""
        found: dict[str, str] = {}
        for (model, before), (_, now) in zip(self._models, after._models, strict=False):
            for name, change in before.attribute_changes(now).items():
                found[f"{name}{_OF_MODEL}"] = _told(change, _place_in(model, name))
            found |= {f"{name}{_OF_MODEL}": "a buffer" for name in before.buffer_changes(now)}
        for name, change in self._globals.changes(after._globals).items():
            values = [held[name] for held in (self._variables, after._variables) if name in held]
            same = len(values) == 2 and values[0] is values[1]
            if not values or (same and ("." in name or _is_state(values[1]))) or after._carries(name, values):
                found[name.removeprefix(_MAIN)] = _told(change, after._globals.place(name))
        return found

    def _carries(self, name: str, values: Sequence[Any]) -> bool:
        """Return whether a variable that was set to another value brings tensors from one step to the next."""
        return (
            len(values) == 2
            and values[0] is not values[1]
            and _holds_tensors(values[1])
            and bool(is_carried(self._scopes[name], name.rpartition(".")[2]))
        )

    def texts(self) -> dict[str, str]:
        """Return the state as texts by name, so that another process can compare its own with it."""
        found: dict[str, str] = {}
        placed = {id(module) for model, _ in self._models for module in model.modules()}
        for model, state in self._models:
            for name, module in model.named_modules():
                found[f"{_MODE}{name or 'the model'}"] = "training" if module.training else "evaluation"
            found |= {f"{name}{_OF_MODEL}": text for name, text in (state.attributes | state.buffers).items()}
        found |= self._globals.values
        for name, value in self._variables.items():
            if isinstance(value, nn.Module) and id(value) not in placed:
                found[name] = f"module {digest(value.state_dict().values())} {value.training}"
        return found

    def lost(self, before: Mapping[str, str]) -> Mapping[str, str]:
        """Return the state that another process had at the same step, by its `texts`, and this one has not.

        The likeliest culprits come first: figures that a loop adds up to print them last.
        """
        found: dict[str, tuple[int, str]] = {}
        models = {f"{name}{_OF_MODEL}": (model, name) for model, state in self._models for name in state.attributes}
        for name, now in self.texts().items():
            was = before.get(name, now)
            if was == now or (name in self._scopes and self._is_set_anew(name)):
                continue
            if name.startswith(_MODE) and f"{_MODE}the model" in found:  # which names its parts' too
                continue
            place = _place_in(*models[name]) if name in models else self._globals.place(name)
            order = _order(self._variables[name]) if name in self._variables else 0
            found[name.removeprefix(_MAIN)] = order, _told(change_of(was, now), place)
        if not found:  # their positions cannot be compared
            found = {name.removeprefix(_MAIN): (0, told) for name, told in self._iterators()}
        least = min((order for order, _ in found.values()), default=0)
        likely = sorted(found.items(), key=lambda each: each[1][0])
        return {name: told for name, (order, told) in likely if order <= max(least, 1)}

    def _is_set_anew(self, name: str) -> bool:
        return is_carried(self._scopes[name], name.rpartition(".")[2]) is False

    def _iterators(self) -> Iterator[tuple[str, str]]:
        for name, value in self._variables.items():
            code = getattr(value, "gi_code", None)
            ours = code is not None and "/lockstep/" in code.co_filename
            if (
                isinstance(value, Iterator)
                and not isinstance(value, count)
                and not ours
                and not self._is_set_anew(name)
            ):
                yield name, _told("an iterator, which begins anew", self._globals.place(name))


def _place_in(model: nn.Module, name: str) -> str:
    """Return the line where an attribute of a model is changed."""
    owner, _, attribute = name.rpartition(".")
    return place_of_attribute(type(model.get_submodule(owner)), attribute)


def _is_state(value: Any) -> bool:
    """Return whether a local variable may lead from one step to the next: a generator, or what holds more than numbers.

    Numbers, and what adds tensors or its own up, are rather what a loop prints at its end.
    """
    if isinstance(value, dict | list | deque):
        return not all(isinstance(each, int | float) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Generator | np.random.Generator | np.random.RandomState | Random | count)


def _holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor with dimensions, or a sequence with one: a 0-dim one is a figure."""
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor) and value.ndim > 0


def _order(value: Any) -> int:
    """Return 0 for what is state in all likelihood, 1 for a count, and 2 for a figure."""
    if isinstance(value, float) or (isinstance(value, Tensor) and not value.ndim):
        return 2
    if isinstance(value, list | deque):
        return 2 if value and all(_order(each) == 2 for each in value) else 0
    return 1 if isinstance(value, int) and not isinstance(value, bool) else 0


def _told(change: str, where: str) -> str:
    return f"{change}, {where}" if where else change
