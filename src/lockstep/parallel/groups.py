"""Parameter groups of the optimizer: options for parameters whose names match a pattern.

The options of a parameter depend on all parameter names of the model. Therefore Lockstep computes them once, before it
splits the model. A rank with only a stage or some rows then looks up the options of its parameters by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lockstep.common.patterns import select_names
from lockstep.errors import UsageError

SCALE: Final = "lr_scale"  # the key in parameter groups, as in timm; saved in checkpoints
_KEY: Final = "recipe.optimizer.groups"


@dataclass(frozen=True)
class GroupSettings:
    """Options for parameters whose names match one of `patterns`. `lr_factor` multiplies the learning rate."""

    patterns: Sequence[str]
    lr_factor: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


def compute_parameter_options(
    names: Sequence[str], groups: Sequence[GroupSettings], lr_factors: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter, by name. Parameters without options are left out.

    If several groups match a name, the first of them applies. `lr_factors` maps names to learning rate factors, e.g.
    from layer-wise decay, which are multiplied by the factor of the group. Raises UsageError if a pattern matches no
    name, or if earlier groups already match all names that a group matches.
    """
    group_of: dict[str, GroupSettings] = {}
    for number, group in enumerate(groups):
        location = f"{_KEY}[{number}].match"
        matching = select_names(location, group.patterns, names, "trained parameter")
        newly_matched = {name: group for name in names if name in matching and name not in group_of}
        if not newly_matched:
            raise UsageError(
                f"{location}: earlier groups already match every parameter that {', '.join(group.patterns)} matches; "
                f"move this group before them"
            )
        group_of |= newly_matched
    by_name = {name: _make_group_options(group_of.get(name), lr_factors.get(name, 1.0)) for name in names}
    return {name: options for name, options in by_name.items() if options}


def find_distinct_options(by_name: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the distinct sets of options in `by_name`, in order of first use."""
    unique: list[dict[str, Any]] = []
    for options in by_name.values():
        if options not in unique:
            unique.append(options)
    return unique


def _make_group_options(group: GroupSettings | None, lr_factor: float) -> dict[str, Any]:
    options = dict(group.options) if group is not None else {}
    factor = lr_factor * (group.lr_factor if group is not None else 1.0)
    return options if factor == 1.0 else {**options, SCALE: factor}
