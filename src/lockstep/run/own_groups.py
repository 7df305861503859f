"""The settings of an optimizer's groups, which the user's code may schedule: what of them is heeded, and what refused.

The user's optimizer does not step. Before the one of the engine does, the numbers among the settings of the user's
groups are handed to its groups; they are compared between ranks and kept in checkpoints. Rates go through step.update.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from torch.optim import Optimizer

from lockstep.common.own_code import refusal
from lockstep.parallel.groups import SCALE

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours

Settings = dict[str, Any]

_RATE: Final = "give the rate to step.update(lr=...), as a function of step.samples_seen: so a resumed run knows it"
_OTHER: Final = "between steps change numbers alone, such as weight_decay or betas; all else before run.place"


@final
class OwnGroup(dict[str, Any]):
    """A group of the user's optimizer: what cannot be heeded is refused in the line that sets it."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check(self, name, value)
        super().__setitem__(name, value)


@final
class Groups:
    """The groups of the user's optimizer, whose settings `take` hands on."""

    def __init__(self, optimizer: Optimizer, of_engine: Sequence[Mapping[str, Any]]) -> None:
        self._optimizer = optimizer
        self._before = [(each, {**each}) for each in optimizer.param_groups]  # the user's code may have these still
        for number, (group, own) in enumerate(zip(optimizer.param_groups, of_engine, strict=True)):
            scale = {SCALE: own[SCALE]} if SCALE in own else {}
            optimizer.param_groups[number] = OwnGroup({**group, **scale})
        self._groups: list[Settings] = [*optimizer.param_groups]
        self._made = [{**each} for each in self._groups]
        self._last = [{**each} for each in self._groups]

    def take(self, of_engine: Sequence[Settings], step: int) -> None:
        """Hand what was changed to the engine's groups; UsageError for what cannot be heeded."""
        if [*map(id, self._optimizer.param_groups)] != [*map(id, self._groups)]:
            raise refusal(f"step {step}: the optimizer's groups were replaced", _OTHER)
        for before, was in self._before:
            if before != was:
                raise refusal(
                    f"step {step}: a group that was taken from the optimizer before run.place was changed",
                    "take it from optimizer.param_groups, which has others since then",
                )
        for group, last, own in zip(self._groups, self._last, of_engine, strict=True):
            if group != last:
                for name in (name for name in {**last, **group} if group.get(name) is not last.get(name)):
                    _check(last, name, group.get(name), f"step {step}: ")
                    own[name] = last[name] = group[name]

    def digest(self, *numbers: float | None) -> int:
        """Return a number that is another for other settings, and other `numbers`."""
        return zlib.crc32(repr([self.changes(), numbers]).encode())

    def changes(self) -> list[Settings]:
        """Return what is not as the optimizer was made, by group, ready for JSON."""
        return [
            {name: value for name, value in group.items() if _may_change(value) and value != made.get(name)}
            for group, made in zip(self._groups, self._made, strict=True)
        ]

    def load(self, changed: Sequence[Settings], of_engine: Sequence[Settings]) -> None:
        """Take over what `changes` returned."""
        for group, last, own, saved in zip(self._groups, self._last, of_engine, changed, strict=True):
            for name, value in saved.items():
                group[name] = last[name] = own[name] = tuple(value) if isinstance(value, list) else value


def _check(group: Mapping[str, Any], name: str, value: Any, at: str = "") -> None:
    """Raise UsageError where a setting of a group cannot become this value."""
    before: Any = group.get(name)
    if value is before or value == before or (name not in group and name != SCALE):
        return
    if name == "lr":
        raise refusal(f"{at}the optimizer's rate was changed, as a scheduler does", _RATE)
    numbers = (name == SCALE or _is_number(before)) and _is_number(value)
    pairs = _is_pair(before) and _is_pair(value) and len(before) == len(value)
    if not numbers and not pairs:
        raise refusal(f"{at}{name} of a group of the optimizer was changed", _OTHER)


def _may_change(value: Any) -> bool:
    return _is_number(value) or _is_pair(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(_is_number, value))
