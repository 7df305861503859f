"""Where a model is cut into stages: by cost, or by hand.

What lies before a module's first call can be cut off there if only tensors and whole numbers cross and no weight is
used on both sides. A module's cost is the mean of two shares: of the model's operations, which are time, and of its
parameters, which are memory. Modules are entered (graph_trace.py) only where that makes more stages, or evener ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor, fx, nn

from lockstep.common.names import suggestion
from lockstep.core.batch import Inputs, call
from lockstep.errors import UsageError
from lockstep.parallel.blocks import find_units
from lockstep.parallel.compiled import compiled_units
from lockstep.parallel.pipeline.call_trace import CallTrace
from lockstep.parallel.pipeline.graph_trace import GraphTrace, Line, UntraceableError, computed_in, place_of, tensors_of
from lockstep.parallel.pipeline.partition import balanced
from lockstep.parallel.pipeline.replay import Part
from lockstep.parallel.tensor.plan import region_names

EVEN_ENOUGH: Final = 1.2  # times the mean cost: no more modules are entered for a dearest stage below that
PATIENCE: Final = 8  # modules entered without a gain, once there is a cut


@dataclass(frozen=True)
class Cut:
    """Where stages 1, 2, ... begin: names of modules, and the modules whose own code is followed to get there."""

    begins: tuple[str, ...] = ()
    entered: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()  # names of blocks that stay whole
    example: Inputs | None = field(default=None, compare=False)  # of the model's inputs
    watched: bool = False  # whether the model's code is run on a ghost, since it cannot be traced


def find_cut(
    model: nn.Module, stages: int, example: Inputs | None, names: Sequence[str] = (), *, whole_blocks: bool = False
) -> Cut:
    """Return a cut of `model` into so many stages, by cost or before the modules `names`.

    With `whole_blocks` none lies within a block (parallel/blocks.py), and none ever within a region that is computed
    chunk by chunk (parallel/tensor/chunks.py). Operations are counted on the inputs `example`;
    with None parameters alone are. `model`, which may lie on the meta device, is left as it is. A model that cannot be
    cut so raises UsageError that says why.
    """
    blank, runs = _blank(model, example)
    blocks = _blocks(blank) if whole_blocks else frozenset()
    regions = region_names(blank)
    if "" in regions:
        raise UsageError(
            "strategy pipeline: recipe.model.chunks cuts layers of the model itself, which is then computed as one; "
            "put them into a module of their own, or use another strategy"
        )
    start = Cut(kept=blocks | regions, example=example)
    if names:
        return _by_hand(blank, stages, names, start, runs)
    return _by_cost(blank, stages, start, runs)


def _by_hand(model: nn.Module, stages: int, names: Sequence[str], start: Cut, runs: bool) -> Cut:
    try:
        return _named(model, stages, names, start, runs)
    except UsageError as error:
        return _untraced(model, start, error, lambda cut: _named(model, stages, names, cut, True))


def _by_cost(model: nn.Module, stages: int, start: Cut, runs: bool) -> Cut:
    """Return the cut whose dearest stage is cheapest; what no trace can follow is run where that gives a better one."""
    try:
        traced = _cheapest(model, stages, start, runs)
    except UsageError as error:
        return _untraced(model, start, error, lambda cut: _cheapest(model, stages, cut, True).cut)
    if not traced.shut or traced.dearest <= EVEN_ENOUGH / stages:
        return traced.cut
    try:
        watched = _cheapest(model, stages, replace(start, watched=True), True)
    except UsageError:
        return traced.cut
    return watched.cut if watched.dearest < traced.dearest else traced.cut


def _untraced(model: nn.Module, start: Cut, error: UsageError, find: Callable[[Cut], Cut]) -> Cut:
    """Return a cut of what a trace cannot follow, or raise why there is none."""
    if start.example is None:
        raise error
    try:
        return find(replace(start, watched=True))
    except UntraceableError:
        raise error from None


def line_of(model: nn.Module, cut: Cut, training: bool) -> Line:
    """Return the model's forward as a row of what its own code and that of the modules entered calls."""
    if cut.watched and cut.example is not None:
        return CallTrace(model, cut.entered, training, cut.kept, cut.example)
    return GraphTrace(model, cut.entered, training, cut.kept, cut.example)


def owners(model: nn.Module, cut: Cut) -> dict[str, int]:
    """Return the stage of each parameter and buffer by name; what no stage uses goes to the last one."""
    found = {key: stages[0] for key, stages in _users(model, cut).items()}
    return {name: found.get(id(tensor), len(cut.begins)) for name, tensor in tensors_of(model)}


def borrowers(model: nn.Module, cut: Cut) -> dict[str, int]:
    """Return, for each tensor that a second stage uses too, that stage, under all of the tensor's names."""
    found = {key: stages[1] for key, stages in _users(model, cut).items() if len(stages) > 1}
    return {name: found[id(tensor)] for name, tensor in tensors_of(model) if id(tensor) in found}


def _users(model: nn.Module, cut: Cut) -> dict[int, list[int]]:
    """Return the stages that use each tensor, by its identity: one, or two where the second may borrow it."""
    found: dict[int, list[int]] = {}
    for training in (False, True):
        line = line_of(model, cut, training)
        lendable = _lendable(model, line)
        for number, part in enumerate(_parts(line, cut)):
            for key in line.tensors(part):
                stages = found.setdefault(key, [number])
                if number not in stages:
                    stages.append(number)
                if len(stages) > 1 and (key not in lendable or len(stages) > 2):
                    name = next(name for name, tensor in tensors_of(model) if id(tensor) == key)
                    raise UsageError(
                        f"strategy pipeline: {name} is used by stages {stages[0]} and {number}; cut elsewhere, so "
                        f"that one stage has all its uses"
                    )
    return {key: sorted(stages) for key, stages in found.items()}


def _lendable(model: nn.Module, line: Line) -> set[int]:
    """Return what may be used on both sides of a cut: a table whose rows are looked up once, and which is used again.

    Of such a weight two gradients are added for a micro-batch, in whatever order: a sum of two has the same bits in
    both. That of the look-up is the last one, however often the other place uses it.
    """
    places: dict[int, list[int]] = {}
    for place in range(line.length):
        for key, tensor in line.tensors(range(place, place + 1)).items():
            if isinstance(tensor, nn.Parameter):
                places.setdefault(key, []).append(place)
    names, modules = dict(line.calls()), dict(model.named_modules())
    found = set()
    for key, used in places.items():
        if len(used) == 2 and used[0] in names:
            tables = [each for each in modules[names[used[0]]].modules() if isinstance(each, nn.Embedding)]
            if [id(table.weight) for table in tables].count(key) == 1:
                found.add(key)
    return found


def _obstacle(model: nn.Module, line: Line, place: int) -> str | None:
    """Return why the line cannot be cut before `place`, if so."""
    behind, lendable = line.tensors(range(place, line.length)), _lendable(model, line)
    for key, tensor in line.tensors(range(place)).items():
        if key in behind and key not in lendable:
            name = next(name for name, each in tensors_of(model) if each is tensor)
            return f"{name} is used on both sides"
    return line.obstacle(place)


def stage_module(model: nn.Module, cut: Cut, stage: int) -> fx.GraphModule:
    """Return a stage in the model's present mode: from the tensors that cross into it to a list of those that leave."""
    line = GraphTrace(model, cut.entered, model.training, cut.kept, cut.example)
    part = _parts(line, cut)[stage]
    return line.module(part.start, part.stop)


def replayed_parts(model: nn.Module, cut: Cut, training: bool) -> list[Part]:
    """Return the stages of a model whose code is run, each with what crosses into it and out of it."""
    assert cut.example is not None
    line = CallTrace(model, cut.entered, training, cut.kept, cut.example)
    names = dict(line.calls())
    ends = [(names[part.start], line.crossing(part.start)) for part in _parts(line, cut)[1:]]
    nothing: tuple[str, ...] = ()
    begins = [(None, nothing), *ends]
    return [Part(*begin, *end) for begin, end in zip(begins, [*ends, (None, nothing)], strict=True)]


def _parts(line: Line, cut: Cut) -> list[range]:
    places = [0]
    for name in cut.begins:
        place = place_of(line, name)
        if place is None or place <= places[-1]:
            met = ", ".join(called for _, called in line.calls())
            raise UsageError(f"strategy pipeline: cut: no stage can begin at {name}; in order, the model calls: {met}")
        places.append(place)
    return [range(start, stop) for start, stop in zip(places, [*places[1:], line.length], strict=True)]


def _named(model: nn.Module, stages: int, names: Sequence[str], start: Cut, runs: bool) -> Cut:
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
    for block in sorted(above & start.kept):
        raise UsageError(
            f"strategy pipeline: cut: no stage can begin within {block}, which recipe.compile or recipe.model.chunks "
            f"takes as one; cut before it, or leave that key out"
        )
    cut = replace(start, begins=tuple(names), entered=frozenset(above))
    line = line_of(model, cut, training=True)
    if runs and cut.example is not None:
        line.measure(cut.example)
    for number, part in enumerate(_parts(line, cut)):
        reason = _obstacle(model, line, part.start) if number else None
        if reason:
            raise UsageError(f"strategy pipeline: cut: no stage can begin at {names[number - 1]}: {reason}")
        if not any(line.trains()[part.start : part.stop]):
            raise UsageError(f"strategy pipeline: cut: stage {number} has no parameter to train; cut elsewhere")
    owners(model, cut)
    return cut


class _Best(NamedTuple):
    """A cut, what its dearest stage has of the model's cost, and whether there was code that could not be followed."""

    cut: Cut
    dearest: float
    shut: bool


def _cheapest(model: nn.Module, stages: int, start: Cut, runs: bool) -> _Best:
    # What cannot be entered. Run as it is, code in a block would read what crosses a cut there.
    shut = {*start.kept, *(_unit_names(model) if start.watched else ())}
    given = len(shut)
    best, lowest, vain = None, float("inf"), 0
    while vain < PATIENCE:
        line = line_of(model, start, training=True)
        costs = _costs(line, start.example if runs else None)
        allowed = {place: name for place, name in line.calls() if place and _obstacle(model, line, place) is None}
        places = balanced(costs, stages, allowed, line.trains())
        if places is not None:
            cut = replace(start, begins=tuple(allowed[place] for place in places))
            dearest = max(sum(costs[part.start : part.stop]) for part in _parts(line, cut))
            if dearest < lowest:
                best, lowest, vain = cut, dearest, 0
        vain += best is not None
        if lowest <= EVEN_ENOUGH / stages:
            break
        name = _dearest(model, line, costs, shut)
        while name is not None and not _can_be_entered(model, _entering(start, name)):
            shut.add(name)
            name = _dearest(model, line, costs, shut)
        if name is None:
            break
        start = _entering(start, name)
    if best is None:
        raise UsageError(_refusal(model, line, stages))
    owners(model, best)
    return _Best(best, lowest, len(shut) > given)


def _entering(cut: Cut, name: str) -> Cut:
    return replace(cut, entered=cut.entered | {name})


def _costs(line: Line, example: Inputs | None) -> list[float]:
    shares = [_shares(line.weights())]
    if example is not None:
        shares.append(_shares(line.measure(example)))
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


def _can_be_entered(model: nn.Module, cut: Cut) -> bool:
    try:
        for training in (False, True):
            line_of(model, cut, training)
    except UsageError:
        return False
    return True


def _refusal(model: nn.Module, line: Line, stages: int) -> str:
    found = [(_obstacle(model, line, place), name) for place, name in line.calls() if place]
    reasons = [f"not before {name}, since {reason}" for reason, name in found if reason]
    told = f" ({'; '.join(reasons[:3])})" if reasons else ""
    return (
        f"strategy pipeline: the model cannot be cut into {stages} stages with parameters to train: its forward calls "
        f"{len(found) + 1} modules one after the other{told}; use fewer stages, or another strategy"
    )


def _unit_names(model: nn.Module) -> frozenset[str]:
    names = {module: name for name, module in model.named_modules()}
    return frozenset(names[block] for block in find_units(model))


def _blocks(model: nn.Module) -> frozenset[str]:
    names = {module: name for name, module in model.named_modules()}
    found = frozenset(names[block] for block in compiled_units(model))
    if "" in found:
        raise UsageError(
            "strategy pipeline: recipe.compile compiles by block, and this model has none, so that it is compiled as "
            "one; use another strategy, or set recipe.compile to false"
        )
    return found


def _blank(model: nn.Module, example: Inputs | None) -> tuple[nn.Module, bool]:
    """Return a copy on the meta device, and whether the example runs there; the model where it has no copy."""
    tensors = [*(tensor for _, tensor in tensors_of(model)), *computed_in(model)]
    memo = {id(tensor): _on_meta(tensor) for tensor in tensors}
    try:
        blank = copy.deepcopy(model, memo)
    except Exception:  # a stranger's model may hold what has no copy
        return model, False
    if example is None:
        return blank, False
    try:
        with torch.no_grad():
            call(blank.train(), example)
    except Exception:  # it reads values, which are not there
        return blank, False
    return blank, True


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
