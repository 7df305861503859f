"""The state that a custom training loop carries from one step to the next, in its model and in variables."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from random import Random
from types import CodeType, ModuleType
from typing import Any, Final, NamedTuple, Self, final

import numpy as np
from torch import Generator, Tensor, nn

from lockstep.probe.state import GlobalState, ModelState, describe_change
from lockstep.setup.user_code import carries_value, find_attribute_line, get_user_modules, is_used, iter_user_frames
from lockstep.verification.held_tensors import compute_digest, find_tensors, list_values

MODEL_SUFFIX: Final = " of the model"
_MODE_PREFIX: Final = "the mode of "
_MAIN_PREFIX: Final = "__main__."
_TENSORS_PREFIX: Final = "the tensors of "
# Priorities of variables by kind. A variable with a lower number is more likely to affect later steps.
_TENSOR: Final = 0
_STATE: Final = 1
_COUNTER: Final = 2
_METRIC: Final = 3
_UNUSED: Final = 4
# Types of variables that a loop can use as an accumulator.
_ACCUMULATOR_TYPES: Final = (int, float, list, dict, set, deque, Tensor)


class LostState(NamedTuple):
    """The state of a script that was lost on resume.

    Both fields map the name of a variable to a description of its change, with the source line. `likely` contains the
    variables that probably affect later steps, with the most likely first. `unused` contains the variables that the
    loop only seems to update, print or log.
    """

    likely: Mapping[str, str]
    unused: Mapping[str, str]


@final
class LoopState:
    """A snapshot of the state of a custom training loop between two steps: its models, globals and local variables.

    A variable that is modified in place is state. A variable that every step reassigns isn't, with two exceptions:

    - It holds a tensor that a step reads before the assignment, such as the hidden state of an RNN.
    - It holds a number that a step reads before the assignment, such as a counter. This only counts if the loop does
      more than print the number, and if no other state has changed.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = get_user_modules(())
        self._models = [(model, ModelState(model)) for model in models]
        scopes = [(frame.f_locals, frame.f_code) for frame in iter_user_frames()]
        self._globals = GlobalState(modules, (), scopes)
        self._variables: dict[str, Any] = {}
        self._scopes: dict[str, ModuleType | CodeType] = {}
        for module_name, module in modules.items():
            for key, value in vars(module).items():
                self._variables[f"{module_name}.{key}"] = value
                self._scopes[f"{module_name}.{key}"] = module
        for variables, code in scopes:
            self._variables |= variables
            self._scopes |= dict.fromkeys(variables, code)

    def find_changes(self, later: Self) -> Mapping[str, str]:
        """Return what changed between this snapshot and `later`: descriptions with source lines, by variable name."""
        changes: dict[str, str] = {}
        numbers: dict[str, str] = {}
        for (model, before), (_, state_after) in zip(self._models, later._models, strict=False):
            for name, change in before.find_attribute_changes(state_after).items():
                changes[f"{name}{MODEL_SUFFIX}"] = _format_change(change, _find_attribute_location(model, name))
            changes |= {f"{name}{MODEL_SUFFIX}": "a buffer" for name in before.find_buffer_changes(state_after)}
        for name, change in self._globals.find_changes(later._globals).items():
            values = [variables[name] for variables in (self._variables, later._variables) if name in variables]
            is_same_object = len(values) == 2 and values[0] is values[1]
            if (
                not values
                or (is_same_object and ("." in name or _can_hold_state(values[1])))
                or later._carries_tensors(name, values)
            ):
                changes[name.removeprefix(_MAIN_PREFIX)] = _format_change(change, later._globals.find_source_line(name))
            elif later._carries_number(name, values):
                numbers[name.removeprefix(_MAIN_PREFIX)] = _format_change(change, later._globals.find_source_line(name))
        return changes or numbers

    def _carries_number(self, name: str, values: Sequence[Any]) -> bool:
        """Return whether a variable holds a number that the loop keeps between steps and doesn't only print."""
        return (
            len(values) == 2
            and all(isinstance(value, int | float) for value in values)
            and bool(carries_value(self._scopes[name], _get_variable_name(name)))
            and is_used(self._scopes[name], _get_variable_name(name))
        )

    def _carries_tensors(self, name: str, values: Sequence[Any]) -> bool:
        """Return whether a variable that each step reassigns carries tensors from one step to the next."""
        return (
            len(values) == 2
            and values[0] is not values[1]
            and _holds_tensors(values[1])
            and bool(carries_value(self._scopes[name], _get_variable_name(name)))
        )

    def to_texts(self) -> dict[str, str]:
        """Return the state as strings by name, so that another process can compare them with its own state."""
        texts: dict[str, str] = {}
        excluded_ids = self._find_model_object_ids()
        for model, state in self._models:
            for name, module in model.named_modules():
                texts[f"{_MODE_PREFIX}{name or 'the model'}"] = "training" if module.training else "evaluation"
            texts |= {f"{name}{MODEL_SUFFIX}": text for name, text in (state.attributes | state.buffers).items()}
        texts |= self._globals.values
        for name, value in self._variables.items():
            if id(value) in excluded_ids or isinstance(value, Tensor):
                continue
            tensors = compute_digest(find_tensors(value, excluded_ids))
            if isinstance(value, nn.Module):
                texts[name] = f"module {tensors} {value.training}"
            else:  # a separate entry, because the text of the value itself may contain the time
                texts[f"{_TENSORS_PREFIX}{name}"] = f"{type(value).__name__} {tensors}"
        return texts

    def compute_priorities(self) -> dict[str, int]:
        """Return the priority of each variable by name. Variables with low numbers probably affect later steps.

        Metrics that the loop only accumulates, and accumulators that no code reads, get high numbers.
        """
        excluded_ids, priorities = self._find_model_object_ids(), {}
        for name, value in self._variables.items():
            priority = _get_priority(value, excluded_ids)
            is_unused = (
                priority != _TENSOR
                and isinstance(value, _ACCUMULATOR_TYPES)
                and not is_used(self._scopes[name], _get_variable_name(name))
            )
            priorities[name] = _UNUSED if is_unused else priority
        return priorities

    def find_lost_state(self, before: Mapping[str, str], priorities: Mapping[str, int]) -> LostState:
        """Return the state that this process lost on resume.

        `before` and `priorities` are the texts and priorities of the state that the stopped process had at the same
        step.
        """
        lost_state: dict[str, tuple[int, str]] = {}
        attribute_owners = {
            f"{name}{MODEL_SUFFIX}": (model, name) for model, state in self._models for name in state.attributes
        }
        for key, text_now in self.to_texts().items():
            name = key.removeprefix(_TENSORS_PREFIX)
            text_before = before.get(key, text_now)
            if text_before == text_now or (name in self._scopes and self._is_reassigned(name)):
                continue
            # The mode of the model includes the modes of its submodules.
            if name.startswith(_MODE_PREFIX) and f"{_MODE_PREFIX}the model" in lost_state:
                continue
            location = (
                _find_attribute_location(*attribute_owners[name])
                if name in attribute_owners
                else self._globals.find_source_line(name)
            )
            entry = priorities.get(name, _STATE), _format_change(describe_change(text_before, text_now), location)
            variable_name = name.removeprefix(_MAIN_PREFIX)
            lost_state[variable_name] = min(lost_state.get(variable_name, entry), entry)
        likely_state = {
            name: description for name, (priority, description) in _sort_by_priority(lost_state) if priority <= _COUNTER
        }
        if not likely_state:
            likely_state = {
                name: description
                for name, (priority, description) in _sort_by_priority(lost_state)
                if priority == _METRIC
            }
        if not likely_state:  # a last resort, because the positions of iterators can't be compared
            likely_state = {
                name.removeprefix(_MAIN_PREFIX): description for name, description in self._find_unsaved_iterators()
            }
        return LostState(
            likely_state,
            {
                name: description
                for name, (priority, description) in _sort_by_priority(lost_state)
                if priority == _UNUSED
            },
        )

    def _find_model_object_ids(self) -> set[int]:
        tensors = [tensor for model, _ in self._models for tensor in (*model.parameters(), *model.buffers())]
        return {id(item) for item in (*tensors, *(module for model, _ in self._models for module in model.modules()))}

    def _is_reassigned(self, name: str) -> bool:
        return carries_value(self._scopes[name], _get_variable_name(name)) is False

    def _find_unsaved_iterators(self) -> Iterator[tuple[str, str]]:
        for name, value in self._variables.items():
            code = getattr(value, "gi_code", None)
            is_lockstep = code is not None and "/lockstep/" in code.co_filename
            if (
                isinstance(value, Iterator)
                and not isinstance(value, count)
                and not is_lockstep
                and not self._is_reassigned(name)
            ):
                yield name, _format_change("an iterator, which starts again", self._globals.find_source_line(name))


def _find_attribute_location(model: nn.Module, name: str) -> str:
    """Return the source line that changes an attribute of a model."""
    owner, _, attribute = name.rpartition(".")
    return find_attribute_line(type(model.get_submodule(owner)), attribute)


def _can_hold_state(value: Any) -> bool:
    """Return whether a local variable that is modified in place can carry state from one step to the next.

    This is true for random number generators, `itertools.count`, and containers with items other than numbers. A
    container of numbers more likely holds metrics that are printed when the loop ends.
    """
    if isinstance(value, dict | list | deque):
        return not all(isinstance(item, int | float) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Generator | np.random.Generator | np.random.RandomState | Random | count)


def _holds_tensors(value: Any) -> bool:
    """Return whether a value is or contains a tensor. 0-dimensional tensors don't count: they are usually metrics."""
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor) and value.ndim > 0


def _get_priority(value: Any, excluded_ids: Collection[int]) -> int:
    if _is_metric(value):
        return _METRIC
    if find_tensors(value, excluded_ids):
        return _TENSOR
    return _COUNTER if isinstance(value, int) and not isinstance(value, bool) else _STATE


def _is_metric(value: Any, depth: int = 2) -> bool:
    """Return whether a value is a float, or a container of numbers with at least one float."""
    if isinstance(value, float):
        return True
    if isinstance(value, Tensor):
        return not value.ndim and value.is_floating_point()
    items = list(list_values(value)) if depth and not isinstance(value, nn.Module | str | int) else []
    are_metrics = [_is_metric(item, depth - 1) for item in items]
    return any(are_metrics) and all(
        is_metric or isinstance(item, int) for is_metric, item in zip(are_metrics, items, strict=True)
    )


def _sort_by_priority(entries: Mapping[str, tuple[int, str]]) -> list[tuple[str, tuple[int, str]]]:
    return sorted(entries.items(), key=lambda entry: entry[1][0])


def _get_variable_name(name: str) -> str:
    """Return a variable's name without its module."""
    return name.rpartition(".")[2]


def _format_change(change: str, location: str) -> str:
    return f"{change}, {location}" if location else change
