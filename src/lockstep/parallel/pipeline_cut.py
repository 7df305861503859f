"""Where a model is cut into stages: by cost, or by hand.

What lies before a module's first call can be cut off there if only tensors and whole numbers cross and no weight is
used on both sides. A module's cost is the mean of two shares: of the model's operations, which are time, and of its
parameters, which are memory. Modules are entered (pipeline_trace.py) only where that makes more stages, or evener ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx, nn

from lockstep.core.batch import Inputs
from lockstep.core.names import suggestion
from lockstep.core.partition import balanced
from lockstep.errors import UsageError
from lockstep.parallel.compiled import compiled_units
from lockstep.parallel.pipeline_trace import Line, only_input, tensors_of

EVEN_ENOUGH: Final = 1.2  # times the mean cost: no more modules are entered for a dearest stage below that
PATIENCE: Final = 8  # modules entered in vain, once there is a cut


@dataclass(frozen=True)
class Cut:
    """Where stages 1, 2, ... begin: names of modules, and the modules whose own code is followed to get there."""

    begins: tuple[str, ...] = ()
    entered: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()  # names of blocks that stay whole


def find_cut(
    model: nn.Module, stages: int, example: Inputs | None, names: Sequence[str] = (), *, whole_blocks: bool = False
) -> Cut:
    """Return a cut of `model` into so many stages, by cost or before the modules `names`.

    With `whole_blocks` none lies within a block (parallel/units.py). Operations are counted on the inputs `example`;
    with None parameters alone are. `model`, which may lie on the meta device, is left as it is. A model that cannot be
    cut so raises UsageError that says why.
    """
    blank, sample = _blank(model, None if example is None else only_input(example))
    kept = _blocks(blank) if whole_blocks else frozenset()
    if names:
        return _by_hand(blank, stages, names, sample, kept)
    return _by_cost(blank, stages, sample, kept)


def owners(model: nn.Module, cut: Cut) -> dict[str, int]:
    """Return the stage of each parameter and buffer by name; what no stage uses goes to the last one."""
    found: dict[int, int] = {}
    for training in (False, True):
        line = Line(model, cut.entered, training, cut.kept)
        for number, part in enumerate(_parts(line, cut)):
            for key in line.tensors(part):
                if found.setdefault(key, number) != number:
                    name = next(name for name, tensor in tensors_of(model) if id(tensor) == key)
                    raise UsageError(
                        f"strategy pipeline: {name} is used by stages {found[key]} and {number}; cut elsewhere, so "
                        f"that one stage has all its uses"
                    )
    return {name: found.get(id(tensor), len(cut.begins)) for name, tensor in tensors_of(model)}


def stage_module(model: nn.Module, cut: Cut, stage: int) -> fx.GraphModule:
    """Return a stage in the model's present mode: from the tensors that cross into it to a list of those that leave."""
    line = Line(model, cut.entered, model.training, cut.kept)
    part = _parts(line, cut)[stage]
    return line.module(part.start, part.stop)


def _parts(line: Line, cut: Cut) -> list[range]:
    places = [0]
    for name in cut.begins:
        place = line.place(name)
        if place is None or place <= places[-1]:
            met = ", ".join(called for _, called in line.calls())
            raise UsageError(f"strategy pipeline: cut: no stage can begin at {name}; in order, the model calls: {met}")
        places.append(place)
    return [range(start, stop) for start, stop in zip(places, [*places[1:], len(line.body)], strict=True)]


def _by_hand(model: nn.Module, stages: int, names: Sequence[str], sample: Tensor | None, kept: frozenset[str]) -> Cut:
    if len(names) != stages - 1:
        raise UsageError(
            f"strategy pipeline: cut names {len(names)} modules, but there are {stages} stages; name the one that "
            f"begins each stage but the first"
        )
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UsageError(f"strategy pipeline: cut: the model has no module {name}{suggestion(name, modules)}")
    above = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1)}
    for block in sorted(above & kept):
        raise UsageError(
            f"strategy pipeline: cut: no stage can begin within block {block}, which recipe.compile compiles as one; "
            f"cut before a block, or set recipe.compile to false"
        )
    cut = Cut(tuple(names), frozenset(above), kept)
    line = Line(model, cut.entered, training=True, kept=kept)
    if sample is not None:
        line.measure(sample)
    for number, part in enumerate(_parts(line, cut)):
        reason = line.obstacle(part.start) if number else None
        if reason:
            raise UsageError(f"strategy pipeline: cut: no stage can begin at {names[number - 1]}: {reason}")
        if not any(line.trains()[part.start : part.stop]):
            raise UsageError(f"strategy pipeline: cut: stage {number} has no parameter to train; cut elsewhere")
    owners(model, cut)
    return cut


def _by_cost(model: nn.Module, stages: int, sample: Tensor | None, kept: frozenset[str]) -> Cut:
    entered: frozenset[str] = frozenset()
    shut = {*kept}  # what cannot be entered
    best, lowest, vain = None, float("inf"), 0
    while vain < PATIENCE:
        line = Line(model, entered, training=True, kept=kept)
        costs = _costs(line, sample)
        allowed = {place: name for place, name in line.calls() if place and line.obstacle(place) is None}
        places = balanced(costs, stages, allowed, line.trains())
        if places is not None:
            cut = Cut(tuple(allowed[place] for place in places), entered, kept)
            dearest = max(sum(costs[part.start : part.stop]) for part in _parts(line, cut))
            if dearest < lowest:
                best, lowest, vain = cut, dearest, 0
        vain += best is not None
        if lowest <= EVEN_ENOUGH / stages:
            break
        name = _dearest(model, line, costs, shut)
        while name is not None and not _can_be_entered(model, entered | {name}, kept):
            shut.add(name)
            name = _dearest(model, line, costs, shut)
        if name is None:
            break
        entered |= {name}
    if best is None:
        raise UsageError(_refusal(line, stages))
    owners(model, best)
    return best


def _costs(line: Line, sample: Tensor | None) -> list[float]:
    shares = [_shares(line.weights())]
    if sample is not None:
        shares.append(_shares(line.measure(sample)))
    return [sum(each) / len(shares) for each in zip(*shares, strict=True)]


def _shares(amounts: list[int]) -> list[float]:
    whole = max(sum(amounts), 1)
    return [amount / whole for amount in amounts]


def _dearest(model: nn.Module, line: Line, costs: list[float], shut: set[str]) -> str | None:
    """Return the dearest module that has parts and is not torch's own: attention, say, is one computation."""
    modules = dict(model.named_modules())
    open_ones = [
        (costs[place], name)
        for place, name in line.calls()
        if name not in shut
        and any(True for _ in modules[name].children())
        and not type(modules[name]).__module__.startswith("torch.nn.")
    ]
    return max(open_ones)[1] if open_ones else None


def _can_be_entered(model: nn.Module, entered: frozenset[str], kept: frozenset[str]) -> bool:
    try:
        for training in (False, True):
            Line(model, entered, training, kept)
    except UsageError:
        return False
    return True


def _refusal(line: Line, stages: int) -> str:
    found = [(line.obstacle(place), name) for place, name in line.calls() if place]
    reasons = [f"not before {name}, since {reason}" for reason, name in found if reason]
    told = f" ({'; '.join(reasons[:3])})" if reasons else ""
    return (
        f"strategy pipeline: the model cannot be cut into {stages} stages with parameters to train: its forward calls "
        f"{len(found) + 1} modules one after the other{told}; use fewer stages, or another strategy"
    )


def _blocks(model: nn.Module) -> frozenset[str]:
    names = {module: name for name, module in model.named_modules()}
    found = frozenset(names[block] for block in compiled_units(model))
    if "" in found:
        raise UsageError(
            "strategy pipeline: recipe.compile compiles by block, and this model has none, so that it is compiled as "
            "one; use another strategy, or set recipe.compile to false"
        )
    return found


def _blank(model: nn.Module, sample: Tensor | None) -> tuple[nn.Module, Tensor | None]:
    """Return a copy on the meta device, and the sample if the copy can run there; the model where it has no copy."""
    memo = {id(tensor): _on_meta(tensor) for _, tensor in tensors_of(model)}
    try:
        blank = copy.deepcopy(model, memo)
    except Exception:  # a stranger's model may hold what has no copy
        return model, None
    if sample is None:
        return blank, None
    try:
        with torch.no_grad():
            blank.train()(sample)
    except Exception:  # it reads values, which are not there
        return blank, None
    return blank, sample


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
