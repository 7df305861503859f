"""Splits a model into stages, by cost or at given modules.

A model can be split before the first call of a module if only tensors and integers cross the split, and if no weight is
used on both sides. The cost of a module is the mean of its fraction of the operations of the model (for time) and its
fraction of the parameters (for memory). A module is only entered (graph_trace.py) if this results in more stages or in
more even stages. The sequence of costs is split into contiguous stages so that the cost of the most expensive stage is
minimal.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor, fx, nn

from lockstep.common.names import suggestion
from lockstep.core.batch import Inputs, call
from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.errors import UsageError
from lockstep.parallel.blocks import find_units
from lockstep.parallel.compiled import units_to_compile
from lockstep.parallel.pipeline.call_trace import CallTrace
from lockstep.parallel.pipeline.graph_trace import GraphTrace, PipelineCut, UntraceableError
from lockstep.parallel.pipeline.part import empty_like, tensors_in_attributes, tensors_of
from lockstep.parallel.pipeline.replay import StagePart
from lockstep.parallel.tensor.plan import region_names

Line = CallTrace | GraphTrace  # a forward pass as a sequence of places

EVEN_ENOUGH: Final = 1.2  # stop entering modules if the most expensive stage costs less than this many times the mean
PATIENCE: Final = 8  # stop after entering this many modules in a row that don't improve a valid cut


def find_cut(
    model: nn.Module, stages: int, example: Inputs | None, names: Sequence[str] = (), *, whole_blocks: bool = False
) -> PipelineCut:
    """Return a cut of `model` into `stages` stages, by cost or before the modules `names`.

    If `whole_blocks` is set, the model is never split within a block (parallel/blocks.py). It is never split within a
    region that is computed chunk by chunk (parallel/tensor/chunks.py). Operations are counted for the inputs `example`.
    If `example` is None, the cost only depends on the parameters. `model` can be on the meta device and isn't modified.
    Raises UsageError with the reason if there is no such cut.
    """
    with drop_new_tensors():
        return _find_cut(model, stages, example, names, whole_blocks)


def _find_cut(
    model: nn.Module, stages: int, example: Inputs | None, names: Sequence[str], whole_blocks: bool
) -> PipelineCut:
    blank, runs = _meta_copy(model, example)
    blocks = _names_to_compile(blank) if whole_blocks else frozenset()
    regions = region_names(blank)
    if "" in regions:
        raise UsageError(
            "strategy pipeline: recipe.model.chunks splits layers of the model itself, which then cannot be split into "
            "stages; move these layers to a separate module, or use a different strategy"
        )
    start = PipelineCut(kept=blocks | regions, example=example)

    def find(start: PipelineCut, runs: bool) -> "_CutResult":
        return _cut_before(blank, stages, names, start, runs) if names else _cut_by_cost(blank, stages, start, runs)

    try:
        traced = find(start, runs)
    except UsageError as error:
        if example is None:
            raise
        try:  # replay the code, because it can't be traced
            return find(replace(start, replayed=True), True).cut
        except UntraceableError:
            raise error from None
    if names or not traced.shut or traced.highest_cost <= EVEN_ENOUGH / stages:
        return traced.cut
    try:  # check if replaying the code allows a better cut
        replayed = find(replace(start, replayed=True), True)
    except UsageError:
        return traced.cut
    return replayed.cut if replayed.highest_cost < traced.highest_cost else traced.cut


def line_of(model: nn.Module, cut: PipelineCut, training: bool) -> Line:
    """Return the forward pass of a model as a sequence of calls, in its own code and in the code of entered modules."""
    if cut.replayed and cut.example is not None:
        return CallTrace(model, cut, training)
    return GraphTrace(model, cut, training)


class Ownership(NamedTuple):
    """The stage that owns each parameter and buffer by name, and the borrowing stage, if any."""

    owner: dict[str, int]
    borrower: dict[str, int]


def ownership(model: nn.Module, cut: PipelineCut) -> Ownership:
    """Return the stages that use each tensor, by each of its names. The last stage owns tensors that no stage uses.

    Raises UsageError if two stages use a tensor that can't be lent (tied_weights.py).
    """
    users: dict[int, list[int]] = {}
    names = {id(tensor): name for name, tensor in reversed(tensors_of(model))}
    for training in (False, True):
        line = line_of(model, cut, training)
        lendable = _find_lendable_weights(model, line)
        for number, part in enumerate(_parts(line, cut)):
            for key in [key for place in part for key in line.used[place]]:
                stages = users.setdefault(key, [number])
                if number not in stages:
                    stages.append(number)
                if len(stages) > 1 and (key not in lendable or len(stages) > 2):
                    raise UsageError(
                        f"strategy pipeline: {names[key]} is used by stages {stages[0]} and {number}; set cut so that "
                        f"only one stage uses it"
                    )
    stages_by_name = [(name, sorted(users.get(id(tensor), [len(cut.begins)]))) for name, tensor in tensors_of(model)]
    return Ownership(
        {name: stages[0] for name, stages in stages_by_name},
        {name: stages[1] for name, stages in stages_by_name if len(stages) > 1},
    )


def _find_lendable_weights(model: nn.Module, line: Line) -> set[int]:
    """Return the ids of the weights that may be used on both sides of a cut.

    These are weights of embeddings that are looked up once and used in one other place. Two gradients of such a weight
    are added per micro-batch, and a sum of two terms has the same bits in any order. The gradient of the look-up always
    comes last, regardless of how often the weight is used in the other place.
    """
    places: dict[int, list[int]] = {}
    for place, used in enumerate(line.used):
        for key, tensor in used.items():
            if isinstance(tensor, nn.Parameter):
                places.setdefault(key, []).append(place)
    names, modules = {place: name for name, place in line.calls.items()}, dict(model.named_modules())
    lendable = set()
    for key, used_at in places.items():
        if len(used_at) == 2 and used_at[0] in names:
            tables = [module for module in modules[names[used_at[0]]].modules() if isinstance(module, nn.Embedding)]
            if [id(table.weight) for table in tables].count(key) == 1:
                lendable.add(key)
    return lendable


def _obstacle(model: nn.Module, line: Line, place: int) -> str | None:
    """Return the reason why the forward pass can't be split before `place`, or None if a split is possible."""
    keys_before = {key for used in line.used[:place] for key in used}
    keys_behind = {key for used in line.used[place:] for key in used}
    shared = (keys_before & keys_behind) - _find_lendable_weights(model, line)
    if shared:
        return f"{next(name for name, tensor in tensors_of(model) if id(tensor) in shared)} is used on both sides"
    return line.obstacle(place)


def _is_trainable(used: Mapping[int, Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in used.values())


def stage_module(model: nn.Module, cut: PipelineCut, stage: int) -> fx.GraphModule:
    """Return a stage in the current mode of the model, as a module from its incoming values to its outgoing values."""
    line = GraphTrace(model, cut, model.training)
    part = _parts(line, cut)[stage]
    return line.module(part.start, part.stop)


def replay_parts(model: nn.Module, cut: PipelineCut, training: bool) -> list[StagePart]:
    """Return the stages of a replayed model, with the paths of the values that enter and leave each stage."""
    line = CallTrace(model, cut, training)
    names = {place: name for name, place in line.calls.items()}
    ends = [(names[part.start], line.crossing(part.start)) for part in _parts(line, cut)[1:]]
    no_values: tuple[str, ...] = ()
    begins = [(None, no_values), *ends]
    return [StagePart(*begin, *end) for begin, end in zip(begins, [*ends, (None, no_values)], strict=True)]


def _parts(line: Line, cut: PipelineCut) -> list[range]:
    places = [0]
    for name in cut.begins:
        # The first call of the module itself or of one of its submodules.
        inside = (place for called, place in line.calls.items() if called == name or called.startswith(f"{name}."))
        place = next(inside, None)
        if place is None or place <= places[-1]:
            names = ", ".join(line.calls)
            raise UsageError(
                f"strategy pipeline: cut: no stage can begin at {name}; name modules in the order of their calls: "
                f"{names}"
            )
        places.append(place)
    return [range(start, stop) for start, stop in zip(places, [*places[1:], len(line.used)], strict=True)]


def _cut_before(model: nn.Module, stages: int, names: Sequence[str], start: PipelineCut, runs: bool) -> "_CutResult":
    if len(names) != stages - 1:
        raise UsageError(
            f"strategy pipeline: cut: the number of modules must be {stages - 1} for {stages} stages, got "
            f"{len(names)}; name the first module of each stage except the first stage"
        )
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UsageError(f"strategy pipeline: cut: the model has no module {name}{suggestion(name, modules)}")
    parents = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1)}
    for block in sorted(parents & start.kept):
        raise UsageError(
            f"strategy pipeline: cut: no stage can begin within {block}, which recipe.compile or recipe.model.chunks "
            f"keeps whole; split before it, or remove that key"
        )
    cut = replace(start, begins=tuple(names), entered=frozenset(parents))
    line = line_of(model, cut, training=True)
    if runs and cut.example is not None:
        line.measure(cut.example)
    for number, part in enumerate(_parts(line, cut)):
        reason = _obstacle(model, line, part.start) if number else None
        if reason:
            raise UsageError(
                f"strategy pipeline: cut: no stage can begin at {names[number - 1]}: {reason}; name a different module"
            )
        if not any(map(_is_trainable, line.used[part.start : part.stop])):
            raise UsageError(
                f"strategy pipeline: cut: stage {number} has no trainable parameter; name different modules"
            )
    ownership(model, cut)
    return _CutResult(cut)


class _CutResult(NamedTuple):
    """A cut, the cost fraction of its most expensive stage, and whether some modules couldn't be entered."""

    cut: PipelineCut
    highest_cost: float = 0.0
    shut: bool = False


def _cut_by_cost(model: nn.Module, stages: int, start: PipelineCut, runs: bool) -> _CutResult:
    # Modules that can't be entered. With replay, code within a block would read the values that cross the cut.
    closed = {*start.kept, *(_names_of(model, find_units(model)) if start.replayed else ())}
    initially_closed = len(closed)
    best, lowest_cost, failures = None, float("inf"), 0
    while failures < PATIENCE:
        line = line_of(model, start, training=True)
        costs = _costs(line, start.example if runs else None)
        allowed = {place: name for name, place in line.calls.items() if place and _obstacle(model, line, place) is None}
        places = balance(costs, stages, allowed, [*map(_is_trainable, line.used)])
        if places is not None:
            cut = replace(start, begins=tuple(allowed[place] for place in places))
            cost = max(sum(costs[part.start : part.stop]) for part in _parts(line, cut))
            if cost < lowest_cost:
                best, lowest_cost, failures = cut, cost, 0
        failures += best is not None
        if lowest_cost <= EVEN_ENOUGH / stages:
            break
        name = _most_expensive_module(model, line, costs, closed)
        while name is not None and not _can_be_entered(model, _with_entered(start, name)):
            closed.add(name)
            name = _most_expensive_module(model, line, costs, closed)
        if name is None:
            break
        start = _with_entered(start, name)
    if best is None:
        raise UsageError(_refusal(model, line, stages))
    ownership(model, best)
    return _CutResult(best, lowest_cost, len(closed) > initially_closed)


def _with_entered(cut: PipelineCut, name: str) -> PipelineCut:
    return replace(cut, entered=cut.entered | {name})


def _costs(line: Line, example: Inputs | None) -> list[float]:
    shares = [_shares(_elements(line))]
    if example is not None:
        shares.append(_shares(line.measure(example)))
    return [sum(costs) / len(shares) for costs in zip(*shares, strict=True)]


def _elements(line: Line) -> list[int]:
    """Return the number of parameter elements at each place. Each parameter is counted where it is first used."""
    counted: set[int] = set()
    counts = []
    for used in line.used:
        counts.append(sum(used[key].numel() for key in used.keys() - counted if isinstance(used[key], nn.Parameter)))
        counted |= used.keys()
    return counts


def _shares(amounts: list[int]) -> list[float]:
    whole = max(sum(amounts), 1)
    return [amount / whole for amount in amounts]


def _most_expensive_module(model: nn.Module, line: Line, costs: list[float], shut: set[str]) -> str | None:
    """Return the most expensive module that could be entered, or None. Modules of torch are never entered."""
    modules = dict(model.named_modules())
    candidates = [
        (costs[place], name)
        for name, place in line.calls.items()
        if name not in shut
        and any(True for _ in modules[name].children())
        and not type(modules[name]).__module__.startswith("torch.nn.")
    ]
    return max(candidates)[1] if candidates else None


def _can_be_entered(model: nn.Module, cut: PipelineCut) -> bool:
    try:
        for training in (False, True):
            line_of(model, cut, training)
    except UsageError:
        return False
    return True


def _refusal(model: nn.Module, line: Line, stages: int) -> str:
    obstacles = [(_obstacle(model, line, place), name) for name, place in line.calls.items() if place]
    reasons = [f"not before {name}, since {reason}" for reason, name in obstacles if reason]
    explanation = f" ({', '.join(reasons[:3])})" if reasons else ""
    return (
        f"strategy pipeline: the model cannot be split into {stages} stages with trainable parameters: its forward "
        f"calls {len(obstacles) + 1} modules in sequence{explanation}; use fewer stages, or a different strategy"
    )


def _names_of(model: nn.Module, blocks: Iterable[nn.Module]) -> frozenset[str]:
    names = {module: name for name, module in model.named_modules()}
    return frozenset(names[block] for block in blocks)


def _names_to_compile(model: nn.Module) -> frozenset[str]:
    names = _names_of(model, units_to_compile(model))
    if "" in names:
        raise UsageError(
            "strategy pipeline: recipe.compile compiles this model as a whole, because it has no blocks; use a "
            "different strategy, or set recipe.compile to false"
        )
    return names


def _meta_copy(model: nn.Module, example: Inputs | None) -> tuple[nn.Module, bool]:
    """Return a copy of the model on the meta device, and whether its forward pass runs there on `example`.

    If the model can't be copied, returns the model itself and False.
    """
    tensors = [*(tensor for _, tensor in tensors_of(model)), *tensors_in_attributes(model)]
    memo = {id(tensor): empty_like(tensor) for tensor in tensors}
    try:
        blank = copy.deepcopy(model, memo)
    except Exception:  # a custom model can contain objects that can't be copied
        return model, False
    if example is None:
        return blank, False
    try:
        with torch.no_grad():
            blank.train()
            call(blank, example)
    except Exception:  # the forward pass reads values, which don't exist on the meta device
        return blank, False
    return blank, True


def balance(costs: Sequence[float], parts: int, allowed: Collection[int], needed: Sequence[bool]) -> list[int] | None:
    """Return `parts` - 1 ascending positions from `allowed` at which to split, or None if there is no such split.

    Position p is before item p. Each part contains at least one item that is `needed`. The split minimizes the cost of
    the most expensive part. Among these splits, it has the smallest sum of squared costs, so that the other parts are
    even too.
    """
    length = len(costs)
    sums, needed_before = [0.0, *accumulate(costs)], [0, *accumulate(map(int, needed))]
    places = [place for place in sorted(set(allowed)) if 0 < place < length]
    ends = [*places, length]

    def best_split(max_cost: float, add: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]] | None:
        """Return the smallest cost (combined by `add`) of a split with parts up to `max_cost`, and its positions."""
        # best[end]: the best split of the items before `end`. Its number of parts grows by one in each round.
        best: dict[int, tuple[float, tuple[int, ...]]]
        best = {end: (add(0.0, sums[end]), ()) for end in ends if needed_before[end] and sums[end] <= max_cost}
        for _ in range(parts - 1):
            rows = {
                end: [
                    (add(best[start][0], sums[end] - sums[start]), (*best[start][1], start))
                    for start in places
                    if start < end and start in best and needed_before[end] > needed_before[start]
                    if sums[end] - sums[start] <= max_cost
                ]
                for end in ends
            }
            best = {end: min(row) for end, row in rows.items() if row}
        return best.get(length)

    # Two passes, because the beginning of an optimal split isn't always an optimal split of its items.
    minimal = best_split(math.inf, max)
    split = minimal and best_split(minimal[0], lambda total, cost: total + cost * cost)
    return None if split is None else list(split[1])
