"""Which parameters the optimizer treats otherwise than the rest, by their names.

What a name is given follows from all names of the model, so it is worked out once, before anything is cut: a rank that
has a stage of the model, or rows of it, then looks its own parameters up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lockstep.common.patterns import select
from lockstep.errors import UsageError

SCALE: Final = "lr_scale"  # of a parameter group: timm's name for it, and a checkpoint keeps it
_KEY: Final = "recipe.optimizer.groups"


@dataclass(frozen=True)
class GroupSettings:
    """Parameters whose names fit one of `patterns`: their rate is `lr_factor` times the optimizer's."""

    patterns: Sequence[str]
    lr_factor: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


def settings(
    names: Sequence[str], groups: Sequence[GroupSettings], scales: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Return what the optimizer's groups say of each of `names` that one says anything of.

    The first group that matches counts. `scales` are factors of the rate by name, such as those of layer decay; they
    multiply a group's. A pattern that matches no name, and a group all of whose names are in an earlier one, raise
    UsageError.
    """
    group_of: dict[str, GroupSettings] = {}
    for number, group in enumerate(groups):
        place = f"{_KEY}[{number}].match"
        found = select(place, group.patterns, names, "trained parameter")
        taken = {name: group for name in names if name in found and name not in group_of}
        if not taken:
            raise UsageError(
                f"{place}: an earlier group has all that {', '.join(group.patterns)} matches; put it first"
            )
        group_of |= taken
    made = {name: _setting(group_of.get(name), scales.get(name, 1.0)) for name in names}
    return {name: setting for name, setting in made.items() if setting}


def distinct(by_name: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each different setting once."""
    found: list[dict[str, Any]] = []
    for setting in by_name.values():
        if setting not in found:
            found.append(setting)
    return found


def _setting(group: GroupSettings | None, scale: float) -> dict[str, Any]:
    options = dict(group.options) if group is not None else {}
    factor = scale * (group.lr_factor if group is not None else 1.0)
    return options if factor == 1.0 else {**options, SCALE: factor}
