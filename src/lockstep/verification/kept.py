"""The state that a custom loop keeps from one step to the next, in its model and in variables."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from random import Random
from types import CodeType, ModuleType
from typing import Any, Final, NamedTuple, Self, final

import numpy as np
from torch import Generator, Tensor, nn

from lockstep.probe.state import Globals, ModelState, change_of
from lockstep.setup.user_code import is_carried, is_used, own_frames, own_modules, place_of_attribute
from lockstep.verification.held_tensors import digest_of, held_tensors, parts

_OF_MODEL: Final = " of the model"
_MODE: Final = "the mode of "
_MAIN: Final = "__main__."
_TENSORS: Final = "the tensors of "
# Kinds of variables. The kinds that most likely affect later steps come first.
_TENSOR: Final = 0
_STATE: Final = 1
_COUNT: Final = 2
_FIGURE: Final = 3
_UNUSED: Final = 4
_PLAIN: Final = (int, float, list, dict, set, deque, Tensor)  # types that a loop can add to without a custom function


class Lost(NamedTuple):
    """The state that a resume lost, by name, with its change and the location. The most likely causes come first.

    `unused` is state that the loop only adds to, prints or logs, as far as Lockstep can tell.
    """

    likely: Mapping[str, str]
    unused: Mapping[str, str]


@final
class Kept:
    """The state of a loop between two steps.

    Variables that each step sets again aren't state. Variables that are changed in place are state. Tensors that a step
    reads before it sets them are state too, such as the hidden state of an RNN carried from batch to batch.
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
        """Return the values that changed and how they changed, with the line if it is known."""
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
        """Return whether a variable that was set to a new value carries tensors from one step to the next."""
        return (
            len(values) == 2
            and values[0] is not values[1]
            and _holds_tensors(values[1])
            and bool(is_carried(self._scopes[name], _variable(name)))
        )

    def texts(self) -> dict[str, str]:
        """Return the state as text by name, so that another process can compare its own state with it."""
        found: dict[str, str] = {}
        placed = self._placed_ids()
        for model, state in self._models:
            for name, module in model.named_modules():
                found[f"{_MODE}{name or 'the model'}"] = "training" if module.training else "evaluation"
            found |= {f"{name}{_OF_MODEL}": text for name, text in (state.attributes | state.buffers).items()}
        found |= self._globals.values
        for name, value in self._variables.items():
            if id(value) in placed or isinstance(value, Tensor):
                continue
            tensors = digest_of(held_tensors(value, placed))
            if isinstance(value, nn.Module):
                found[name] = f"module {tensors} {value.training}"
            else:  # in addition to its text, which may contain the time
                found[f"{_TENSORS}{name}"] = f"{type(value).__name__} {tensors}"
        return found

    def likelihoods(self) -> dict[str, int]:
        """Return how likely each variable is to affect later steps, as a number: lower is more likely.

        Metrics that a loop adds up are probably only for its author to read, and certainly if nothing else reads them.
        """
        placed, found = self._placed_ids(), {}
        for name, value in self._variables.items():
            kind = _likelihood(value, placed)
            unused = kind != _TENSOR and isinstance(value, _PLAIN) and not is_used(self._scopes[name], _variable(name))
            found[name] = _UNUSED if unused else kind
        return found

    def lost(self, before: Mapping[str, str], likelihoods: Mapping[str, int]) -> Lost:
        """Return the state that this process lacks, compared with the `texts` of another process at the same step."""
        found: dict[str, tuple[int, str]] = {}
        models = {f"{name}{_OF_MODEL}": (model, name) for model, state in self._models for name in state.attributes}
        for key, now in self.texts().items():
            name = key.removeprefix(_TENSORS)
            was = before.get(key, now)
            if was == now or (name in self._scopes and self._is_set_anew(name)):
                continue
            if name.startswith(_MODE) and f"{_MODE}the model" in found:  # the whole model includes its parts
                continue
            place = _place_in(*models[name]) if name in models else self._globals.place(name)
            told = likelihoods.get(name, _STATE), _told(change_of(was, now), place)
            shown = name.removeprefix(_MAIN)
            found[shown] = min(found.get(shown, told), told)
        likely = {name: told for name, (order, told) in _sorted(found) if order <= _COUNT}
        if not likely:
            likely = {name: told for name, (order, told) in _sorted(found) if order == _FIGURE}
        if not likely:  # positions of iterators can't be compared
            likely = {name.removeprefix(_MAIN): told for name, told in self._iterators()}
        return Lost(likely, {name: told for name, (order, told) in _sorted(found) if order == _UNUSED})

    def _placed_ids(self) -> set[int]:
        tensors = [each for model, _ in self._models for each in (*model.parameters(), *model.buffers())]
        return {id(each) for each in (*tensors, *(module for model, _ in self._models for module in model.modules()))}

    def _is_set_anew(self, name: str) -> bool:
        return is_carried(self._scopes[name], _variable(name)) is False

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
                yield name, _told("an iterator, which starts again", self._globals.place(name))


def _place_in(model: nn.Module, name: str) -> str:
    """Return the line that changes an attribute of a model."""
    owner, _, attribute = name.rpartition(".")
    return place_of_attribute(type(model.get_submodule(owner)), attribute)


def _is_state(value: Any) -> bool:
    """Return whether a local variable can carry state from step to step.

    Random generators, counters, and containers of more than numbers can. Numbers, and containers of numbers, are more
    likely metrics that a loop prints at its end.
    """
    if isinstance(value, dict | list | deque):
        return not all(isinstance(each, int | float) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Generator | np.random.Generator | np.random.RandomState | Random | count)


def _holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor with dimensions, or a sequence with one. A 0-dim tensor is a metric."""
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor) and value.ndim > 0


def _likelihood(value: Any, placed: Collection[int]) -> int:
    if _is_figure(value):
        return _FIGURE
    if held_tensors(value, placed):
        return _TENSOR
    return _COUNT if isinstance(value, int) and not isinstance(value, bool) else _STATE


def _is_figure(value: Any, depth: int = 2) -> bool:
    """Return whether a value is a float, or holds only numbers with at least one float among them."""
    if isinstance(value, float):
        return True
    if isinstance(value, Tensor):
        return not value.ndim and value.is_floating_point()
    held = list(parts(value)) if depth and not isinstance(value, nn.Module | str | int) else []
    figures = [_is_figure(each, depth - 1) for each in held]
    return any(figures) and all(figure or isinstance(each, int) for figure, each in zip(figures, held, strict=True))


def _sorted(found: Mapping[str, tuple[int, str]]) -> list[tuple[str, tuple[int, str]]]:
    return sorted(found.items(), key=lambda each: each[1][0])


def _variable(name: str) -> str:
    """Return the name of a variable within its module or function."""
    return name.rpartition(".")[2]


def _told(change: str, where: str) -> str:
    return f"{change}, {where}" if where else change
