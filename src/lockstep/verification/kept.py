"""The state that a custom training loop carries from one step to the next, in its model and in variables."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from random import Random
from types import CodeType, ModuleType
from typing import Any, Final, NamedTuple, Self, final

import numpy as np
from torch import Generator, Tensor, nn

from lockstep.probe.state import Globals, ModelState, describe_change
from lockstep.setup.user_code import carries_value, is_used, own_frames, own_modules, place_of_attribute
from lockstep.verification.held_tensors import digest_of, held_tensors, parts

_MODEL_SUFFIX: Final = " of the model"
_MODE: Final = "the mode of "
_MAIN: Final = "__main__."
_TENSORS: Final = "the tensors of "
# Kinds of variables. Lower numbers are more likely to affect later steps.
_TENSOR: Final = 0
_STATE: Final = 1
_COUNT: Final = 2
_FIGURE: Final = 3
_UNUSED: Final = 4
# Types to which a loop can add without custom functions.
_ACCUMULATOR_TYPES: Final = (int, float, list, dict, set, deque, Tensor)


class LostState(NamedTuple):
    """The state that was lost by resuming: by name, its change and location. The most likely causes come first.

    `unused` is state that the loop only updates, prints or logs, as far as Lockstep can tell.
    """

    likely: Mapping[str, str]
    unused: Mapping[str, str]


@final
class Kept:
    """The state of a training loop between two steps.

    A variable that each step assigns again isn't state. A variable that is modified in place is state. A tensor that a
    step reads before assigning its variable is also state, such as the hidden state of an RNN that is carried from
    batch to batch.
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
        """Return the values that changed, by name, with a description of the change and its line if known."""
        changes: dict[str, str] = {}
        for (model, before), (_, state_after) in zip(self._models, after._models, strict=False):
            for name, change in before.attribute_changes(state_after).items():
                changes[f"{name}{_MODEL_SUFFIX}"] = _describe(change, _place_in(model, name))
            changes |= {f"{name}{_MODEL_SUFFIX}": "a buffer" for name in before.buffer_changes(state_after)}
        for name, change in self._globals.changes(after._globals).items():
            values = [variables[name] for variables in (self._variables, after._variables) if name in variables]
            is_same_object = len(values) == 2 and values[0] is values[1]
            if not values or (is_same_object and ("." in name or _is_state(values[1]))) or after._carries(name, values):
                changes[name.removeprefix(_MAIN)] = _describe(change, after._globals.source_line(name))
        return changes

    def _carries(self, name: str, values: Sequence[Any]) -> bool:
        """Return whether a reassigned variable carries tensors from one step to the next."""
        return (
            len(values) == 2
            and values[0] is not values[1]
            and _holds_tensors(values[1])
            and bool(carries_value(self._scopes[name], _variable(name)))
        )

    def texts(self) -> dict[str, str]:
        """Return the state as text by name, so that another process can compare it with its own state."""
        texts: dict[str, str] = {}
        placed_ids = self._placed_ids()
        for model, state in self._models:
            for name, module in model.named_modules():
                texts[f"{_MODE}{name or 'the model'}"] = "training" if module.training else "evaluation"
            texts |= {f"{name}{_MODEL_SUFFIX}": text for name, text in (state.attributes | state.buffers).items()}
        texts |= self._globals.values
        for name, value in self._variables.items():
            if id(value) in placed_ids or isinstance(value, Tensor):
                continue
            tensors = digest_of(held_tensors(value, placed_ids))
            if isinstance(value, nn.Module):
                texts[name] = f"module {tensors} {value.training}"
            else:  # stored separately from the text of the value, which may contain the time
                texts[f"{_TENSORS}{name}"] = f"{type(value).__name__} {tensors}"
        return texts

    def likelihoods(self) -> dict[str, int]:
        """Return how likely each variable is to affect later steps, as a number. Lower numbers are more likely.

        Metrics that a loop accumulates are probably only displayed. If no other code reads a metric, it can't affect a
        step.
        """
        placed_ids, likelihoods = self._placed_ids(), {}
        for name, value in self._variables.items():
            kind = _likelihood(value, placed_ids)
            is_unused = (
                kind != _TENSOR
                and isinstance(value, _ACCUMULATOR_TYPES)
                and not is_used(self._scopes[name], _variable(name))
            )
            likelihoods[name] = _UNUSED if is_unused else kind
        return likelihoods

    def lost(self, before: Mapping[str, str], likelihoods: Mapping[str, int]) -> LostState:
        """Return the lost state, by comparing this process with the `texts` of a different process at the same step."""
        lost_state: dict[str, tuple[int, str]] = {}
        models = {f"{name}{_MODEL_SUFFIX}": (model, name) for model, state in self._models for name in state.attributes}
        for key, text_now in self.texts().items():
            name = key.removeprefix(_TENSORS)
            text_before = before.get(key, text_now)
            if text_before == text_now or (name in self._scopes and self._is_reassigned(name)):
                continue
            if name.startswith(_MODE) and f"{_MODE}the model" in lost_state:  # the full model includes its submodules
                continue
            location = _place_in(*models[name]) if name in models else self._globals.source_line(name)
            entry = likelihoods.get(name, _STATE), _describe(describe_change(text_before, text_now), location)
            label = name.removeprefix(_MAIN)
            lost_state[label] = min(lost_state.get(label, entry), entry)
        likely_state = {name: description for name, (order, description) in _sorted(lost_state) if order <= _COUNT}
        if not likely_state:
            likely_state = {name: description for name, (order, description) in _sorted(lost_state) if order == _FIGURE}
        if not likely_state:  # the position of an iterator can't be compared
            likely_state = {name.removeprefix(_MAIN): description for name, description in self._iterators()}
        return LostState(
            likely_state, {name: description for name, (order, description) in _sorted(lost_state) if order == _UNUSED}
        )

    def _placed_ids(self) -> set[int]:
        tensors = [tensor for model, _ in self._models for tensor in (*model.parameters(), *model.buffers())]
        return {id(item) for item in (*tensors, *(module for model, _ in self._models for module in model.modules()))}

    def _is_reassigned(self, name: str) -> bool:
        return carries_value(self._scopes[name], _variable(name)) is False

    def _iterators(self) -> Iterator[tuple[str, str]]:
        for name, value in self._variables.items():
            code = getattr(value, "gi_code", None)
            is_lockstep = code is not None and "/lockstep/" in code.co_filename
            if (
                isinstance(value, Iterator)
                and not isinstance(value, count)
                and not is_lockstep
                and not self._is_reassigned(name)
            ):
                yield name, _describe("an iterator, which starts again", self._globals.source_line(name))


def _place_in(model: nn.Module, name: str) -> str:
    """Return the line that changes an attribute of a model."""
    owner, _, attribute = name.rpartition(".")
    return place_of_attribute(type(model.get_submodule(owner)), attribute)


def _is_state(value: Any) -> bool:
    """Return whether a local variable can carry state from step to step.

    Random generators, counters, and containers of more than numbers can. Numbers, and containers of numbers, are more
    likely to be metrics that a loop prints at its end.
    """
    if isinstance(value, dict | list | deque):
        return not all(isinstance(item, int | float) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Generator | np.random.Generator | np.random.RandomState | Random | count)


def _holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor with dimensions, or a sequence with one. 0-dim tensors are metrics."""
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor) and value.ndim > 0


def _likelihood(value: Any, placed_ids: Collection[int]) -> int:
    if _is_metric(value):
        return _FIGURE
    if held_tensors(value, placed_ids):
        return _TENSOR
    return _COUNT if isinstance(value, int) and not isinstance(value, bool) else _STATE


def _is_metric(value: Any, depth: int = 2) -> bool:
    """Return whether a value is a float, or contains only numbers, of which at least one is a float."""
    if isinstance(value, float):
        return True
    if isinstance(value, Tensor):
        return not value.ndim and value.is_floating_point()
    items = list(parts(value)) if depth and not isinstance(value, nn.Module | str | int) else []
    are_metrics = [_is_metric(item, depth - 1) for item in items]
    return any(are_metrics) and all(
        is_metric or isinstance(item, int) for is_metric, item in zip(are_metrics, items, strict=True)
    )


def _sorted(entries: Mapping[str, tuple[int, str]]) -> list[tuple[str, tuple[int, str]]]:
    return sorted(entries.items(), key=lambda entry: entry[1][0])


def _variable(name: str) -> str:
    """Return a variable's name without its module."""
    return name.rpartition(".")[2]


def _describe(change: str, location: str) -> str:
    return f"{change}, {location}" if location else change
