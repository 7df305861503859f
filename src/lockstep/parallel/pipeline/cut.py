"""Partitions a model into stages, by cost or at given modules.

A model can be split before the first call of a module if only tensors and integers cross the split, and if no weight is
used on both sides. The cost of a module is the mean of its fraction of the model's operations (for time) and its
fraction of the model's parameters (for memory). The modules are split in call order into contiguous stages, so that the
most expensive stage is as cheap as possible. A module is expanded into its submodules (graph_trace.py) only if this
allows more stages or balances them better.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor, fx, nn

from lockstep.common.names import format_suggestion
from lockstep.core.batch import Inputs, call_model
from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.errors import UsageError
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.compiled import find_modules_to_compile
from lockstep.parallel.pipeline.call_trace import CallTrace
from lockstep.parallel.pipeline.graph_trace import GraphTrace, PipelineCut, UntraceableError
from lockstep.parallel.pipeline.part import find_nonleaf_attributes, make_meta_tensor, named_tensors
from lockstep.parallel.pipeline.replay import ReplayStage
from lockstep.parallel.tensor.plan import find_region_names

ForwardTrace = CallTrace | GraphTrace  # a forward pass as a sequence of module calls and other operations

# Don't expand more modules if the most expensive stage costs at most this many times the mean.
_MAX_IMBALANCE: Final = 1.2
_MAX_FAILURES: Final = 8  # stop after this many expansions in a row that don't improve the cut


def find_cut(
    model: nn.Module,
    num_stages: int,
    example: Inputs | None,
    module_names: Sequence[str] = (),
    *,
    whole_blocks: bool = False,
) -> PipelineCut:
    """Find where to split `model` into `num_stages` stages.

    If `module_names` is set, each stage except the first begins at one of these modules. Otherwise, the stages are
    balanced by cost. Operations are counted for the inputs `example`. If it is None, the cost only depends on the
    parameters. The model is never split within a region of tensor parallelism (parallel/tensor/chunks.py) or, with
    `whole_blocks`, within a block (parallel/blocks.py). `model` can be on the meta device, and isn't modified. Raises
    UsageError with the reason if the model can't be split.
    """
    with drop_new_tensors():
        return _find_cut(model, num_stages, example, module_names, whole_blocks)


def _find_cut(
    model: nn.Module, num_stages: int, example: Inputs | None, module_names: Sequence[str], whole_blocks: bool
) -> PipelineCut:
    meta_model, runs_on_meta = _copy_to_meta(model, example)
    blocks = _get_compiled_module_names(meta_model) if whole_blocks else frozenset()
    regions = find_region_names(meta_model)
    if "" in regions:
        raise UsageError(
            "strategy pipeline: recipe.model.chunks splits layers of the top-level module, so the model cannot be "
            "split into stages; move these layers to a submodule, or use a different strategy"
        )
    start = PipelineCut(unsplit=blocks | regions, example=example)

    def find_cut_from(base_cut: PipelineCut, runs_on_meta: bool) -> "_CutResult":
        return (
            _cut_at_modules(meta_model, num_stages, module_names, base_cut, runs_on_meta)
            if module_names
            else _cut_by_cost(meta_model, num_stages, base_cut, runs_on_meta)
        )

    try:
        traced = find_cut_from(start, runs_on_meta)
    except UsageError as error:
        if example is None:
            raise
        try:  # the code can't be traced, so run it again in each stage
            return find_cut_from(replace(start, replayed=True), True).cut
        except UntraceableError:
            raise error from None
    if module_names or not traced.has_opaque_modules or traced.highest_cost <= _MAX_IMBALANCE / num_stages:
        return traced.cut
    try:  # running the code again in each stage may allow a better cut
        replayed = find_cut_from(replace(start, replayed=True), True)
    except UsageError:
        return traced.cut
    return replayed.cut if replayed.highest_cost < traced.highest_cost else traced.cut


def trace_forward(model: nn.Module, cut: PipelineCut, training: bool) -> ForwardTrace:
    """Trace the forward pass of a model, including the code of the modules in `cut.expanded`."""
    if cut.replayed and cut.example is not None:
        return CallTrace(model, cut, training)
    return GraphTrace(model, cut, training)


class Ownership(NamedTuple):
    """The stage that owns each tensor and, for tensors that two stages use, the stage that borrows it, by name."""

    owner: dict[str, int]
    borrower: dict[str, int]


def find_owners(model: nn.Module, cut: PipelineCut) -> Ownership:
    """Return the stages that own and borrow each parameter and buffer, by name.

    The last stage owns the tensors that no stage uses. A tensor with several names appears under each name. Raises
    UsageError if several stages use a tensor that can't be lent (tied_weights.py).
    """
    users: dict[int, list[int]] = {}
    names = {id(tensor): name for name, tensor in reversed(named_tensors(model))}
    for training in (False, True):
        trace = trace_forward(model, cut, training)
        lendable = _find_lendable_weights(model, trace)
        for number, part in enumerate(_get_stage_ranges(trace, cut)):
            for key in [key for position in part for key in trace.used[position]]:
                stages = users.setdefault(key, [number])
                if number not in stages:
                    stages.append(number)
                if len(stages) > 1 and (key not in lendable or len(stages) > 2):
                    raise UsageError(
                        f"strategy pipeline: {names[key]} is used by stages {stages[0]} and {number}; set cut so that "
                        f"only one stage uses {names[key]}"
                    )
    stages_by_name = [
        (name, sorted(users.get(id(tensor), [len(cut.stage_starts)]))) for name, tensor in named_tensors(model)
    ]
    return Ownership(
        {name: stages[0] for name, stages in stages_by_name},
        {name: stages[1] for name, stages in stages_by_name if len(stages) > 1},
    )


def _find_lendable_weights(model: nn.Module, trace: ForwardTrace) -> set[int]:
    """Return the ids of the weights that the stages on both sides of a split may use.

    These are the weights of embeddings that are used at exactly one later position. In each micro-batch, such a weight
    gets one gradient from each of the two stages, and the sum of two terms has the same bits in either order. The
    gradient of the embedding comes last in the backward pass, however often the later module uses the weight.
    """
    positions: dict[int, list[int]] = {}
    for position, used in enumerate(trace.used):
        for key, tensor in used.items():
            if isinstance(tensor, nn.Parameter):
                positions.setdefault(key, []).append(position)
    names, modules = {position: name for name, position in trace.calls.items()}, dict(model.named_modules())
    lendable = set()
    for key, positions_of_weight in positions.items():
        if len(positions_of_weight) == 2 and positions_of_weight[0] in names:
            embeddings = [
                module
                for module in modules[names[positions_of_weight[0]]].modules()
                if isinstance(module, nn.Embedding)
            ]
            if [id(embedding.weight) for embedding in embeddings].count(key) == 1:
                lendable.add(key)
    return lendable


def _find_obstacle(model: nn.Module, trace: ForwardTrace, position: int) -> str | None:
    """Return why the forward pass can't be split before `position`, or None if it can."""
    keys_before = {key for used in trace.used[:position] for key in used}
    keys_after = {key for used in trace.used[position:] for key in used}
    shared = (keys_before & keys_after) - _find_lendable_weights(model, trace)
    if shared:
        return f"{next(name for name, tensor in named_tensors(model) if id(tensor) in shared)} is used on both sides"
    return trace.find_obstacle(position)


def _has_trainable_tensor(tensors: Mapping[int, Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors.values())


def build_stage_module(model: nn.Module, cut: PipelineCut, stage: int) -> fx.GraphModule:
    """Return a module that maps the incoming values of a stage to its outgoing values, in the model's current mode."""
    trace = GraphTrace(model, cut, model.training)
    part = _get_stage_ranges(trace, cut)[stage]
    return trace.build_module(part.start, part.stop)


def make_replay_stages(model: nn.Module, cut: PipelineCut, training: bool) -> list[ReplayStage]:
    """Return all stages of a model that is run by replay (replay.py)."""
    trace = CallTrace(model, cut, training)
    names = {position: name for name, position in trace.calls.items()}
    boundaries = [
        (names[part.start], trace.get_boundary_paths(part.start)) for part in _get_stage_ranges(trace, cut)[1:]
    ]
    no_paths: tuple[str, ...] = ()
    stage_starts = [(None, no_paths), *boundaries]
    return [ReplayStage(*begin, *end) for begin, end in zip(stage_starts, [*boundaries, (None, no_paths)], strict=True)]


def _get_stage_ranges(trace: ForwardTrace, cut: PipelineCut) -> list[range]:
    positions = [0]
    for name in cut.stage_starts:
        # The stage begins with the first call of the module or of one of its submodules.
        inside = (
            position for called, position in trace.calls.items() if called == name or called.startswith(f"{name}.")
        )
        position = next(inside, None)
        if position is None or position <= positions[-1]:
            names = ", ".join(trace.calls)
            raise UsageError(
                f"strategy pipeline: cut: no stage can begin at {name}; list modules in the order of their calls: "
                f"{names}"
            )
        positions.append(position)
    return [range(start, stop) for start, stop in zip(positions, [*positions[1:], len(trace.used)], strict=True)]


def _cut_at_modules(
    model: nn.Module, num_stages: int, module_names: Sequence[str], base_cut: PipelineCut, runs_on_meta: bool
) -> "_CutResult":
    if len(module_names) != num_stages - 1:
        raise UsageError(
            f"strategy pipeline: cut: the number of modules must be {num_stages - 1} for {num_stages} stages, got "
            f"{len(module_names)}; list the first module of each stage except the first stage"
        )
    modules = dict(model.named_modules())
    for name in module_names:
        if not name or name not in modules:
            raise UsageError(
                f"strategy pipeline: cut: the model has no module {name}{format_suggestion(name, modules)}"
            )
    parents = {".".join(name.split(".")[:depth]) for name in module_names for depth in range(1, name.count(".") + 1)}
    for block in sorted(parents & base_cut.unsplit):
        raise UsageError(
            f"strategy pipeline: cut: no stage can begin within {block}, because recipe.compile or recipe.model.chunks "
            f"keeps it together; list {block} in cut instead, or unset the key that you set"
        )
    cut = replace(base_cut, stage_starts=tuple(module_names), expanded=frozenset(parents))
    trace = trace_forward(model, cut, training=True)
    if runs_on_meta and cut.example is not None:
        trace.measure(cut.example)
    for number, part in enumerate(_get_stage_ranges(trace, cut)):
        reason = _find_obstacle(model, trace, part.start) if number else None
        if reason:
            raise UsageError(
                f"strategy pipeline: cut: no stage can begin at {module_names[number - 1]}: {reason}; list a different "
                f"module in cut"
            )
        if not any(map(_has_trainable_tensor, trace.used[part.start : part.stop])):
            raise UsageError(
                f"strategy pipeline: cut: stage {number} has no trainable parameters; list different modules in cut"
            )
    find_owners(model, cut)
    return _CutResult(cut)


class _CutResult(NamedTuple):
    """A cut, the most expensive stage's share of the total cost, and whether any module couldn't be expanded."""

    cut: PipelineCut
    highest_cost: float = 0.0
    has_opaque_modules: bool = False


def _cut_by_cost(model: nn.Module, num_stages: int, base_cut: PipelineCut, runs_on_meta: bool) -> _CutResult:
    # Modules that aren't expanded. If the model is replayed, these include the blocks, because the code between the
    # modules of a block reads module outputs.
    opaque = {*base_cut.unsplit, *(_get_module_names(model, find_blocks(model)) if base_cut.replayed else ())}
    initially_opaque = len(opaque)
    best, lowest_cost, failures = None, float("inf"), 0
    while failures < _MAX_FAILURES:
        trace = trace_forward(model, base_cut, training=True)
        costs = _compute_costs(trace, base_cut.example if runs_on_meta else None)
        allowed = {
            position: name
            for name, position in trace.calls.items()
            if position and _find_obstacle(model, trace, position) is None
        }
        positions = split_by_cost(costs, num_stages, allowed, [*map(_has_trainable_tensor, trace.used)])
        if positions is not None:
            cut = replace(base_cut, stage_starts=tuple(allowed[position] for position in positions))
            cost = max(sum(costs[part.start : part.stop]) for part in _get_stage_ranges(trace, cut))
            if cost < lowest_cost:
                best, lowest_cost, failures = cut, cost, 0
        failures += best is not None
        if lowest_cost <= _MAX_IMBALANCE / num_stages:
            break
        name = _find_most_expensive_module(model, trace, costs, opaque)
        while name is not None and not _can_trace(model, _expand_module(base_cut, name)):
            opaque.add(name)
            name = _find_most_expensive_module(model, trace, costs, opaque)
        if name is None:
            break
        base_cut = _expand_module(base_cut, name)
    if best is None:
        raise UsageError(_explain_no_cut(model, trace, num_stages))
    find_owners(model, best)
    return _CutResult(best, lowest_cost, len(opaque) > initially_opaque)


def _expand_module(cut: PipelineCut, module_name: str) -> PipelineCut:
    return replace(cut, expanded=cut.expanded | {module_name})


def _compute_costs(trace: ForwardTrace, example: Inputs | None) -> list[float]:
    shares = [_normalize(_count_parameters(trace))]
    if example is not None:
        shares.append(_normalize(trace.measure(example)))
    return [sum(costs) / len(shares) for costs in zip(*shares, strict=True)]


def _count_parameters(trace: ForwardTrace) -> list[int]:
    """Return the number of parameter elements at each position. A parameter is only counted at its first use."""
    counted: set[int] = set()
    counts = []
    for used in trace.used:
        counts.append(sum(used[key].numel() for key in used.keys() - counted if isinstance(used[key], nn.Parameter)))
        counted |= used.keys()
    return counts


def _normalize(amounts: list[int]) -> list[float]:
    total = max(sum(amounts), 1)
    return [amount / total for amount in amounts]


def _find_most_expensive_module(
    model: nn.Module, trace: ForwardTrace, costs: list[float], opaque: set[str]
) -> str | None:
    """Return the name of the most expensive module that may be expanded, or None. Skips modules of torch.nn."""
    modules = dict(model.named_modules())
    candidates = [
        (costs[position], name)
        for name, position in trace.calls.items()
        if name not in opaque
        and any(True for _ in modules[name].children())
        and not type(modules[name]).__module__.startswith("torch.nn.")
    ]
    return max(candidates)[1] if candidates else None


def _can_trace(model: nn.Module, cut: PipelineCut) -> bool:
    try:
        for training in (False, True):
            trace_forward(model, cut, training)
    except UsageError:
        return False
    return True


def _explain_no_cut(model: nn.Module, trace: ForwardTrace, num_stages: int) -> str:
    obstacles = [(_find_obstacle(model, trace, position), name) for name, position in trace.calls.items() if position]
    reasons = [f"not before {name}, since {reason}" for reason, name in obstacles if reason]
    explanation = f" ({', '.join(reasons[:3])})" if reasons else ""
    return (
        f"strategy pipeline: the model cannot be split into {num_stages} stages with trainable parameters: its forward "
        f"pass calls {len(obstacles) + 1} modules in sequence{explanation}; use fewer stages, or a different strategy"
    )


def _get_module_names(model: nn.Module, blocks: Iterable[nn.Module]) -> frozenset[str]:
    names = {module: name for name, module in model.named_modules()}
    return frozenset(names[block] for block in blocks)


def _get_compiled_module_names(model: nn.Module) -> frozenset[str]:
    names = _get_module_names(model, find_modules_to_compile(model))
    if "" in names:
        raise UsageError(
            "strategy pipeline: recipe.compile compiles this model as a whole, because it has no blocks; use a "
            "different strategy, or set recipe.compile to false"
        )
    return names


def _copy_to_meta(model: nn.Module, example: Inputs | None) -> tuple[nn.Module, bool]:
    """Copy the model to the meta device. Returns the copy, and whether its forward pass can run on `example`.

    If the model can't be copied, returns the original model and False.
    """
    tensors = [*(tensor for _, tensor in named_tensors(model)), *find_nonleaf_attributes(model)]
    memo = {id(tensor): make_meta_tensor(tensor) for tensor in tensors}
    try:
        meta_model = copy.deepcopy(model, memo)
    except Exception:  # a custom model can contain objects that can't be copied
        return model, False
    if example is None:
        return meta_model, False
    try:
        with torch.no_grad():
            meta_model.train()
            call_model(meta_model, example)
    except Exception:  # the forward pass reads tensor values, which don't exist on the meta device
        return meta_model, False
    return meta_model, True


def split_by_cost(
    costs: Sequence[float], num_parts: int, allowed_positions: Collection[int], is_needed: Sequence[bool]
) -> list[int] | None:
    """Split a sequence of items into `num_parts` contiguous parts of balanced cost.

    Returns `num_parts` - 1 ascending positions from `allowed_positions`, or None if there is no such split. Position p
    is before item p. Each part contains at least one item for which `is_needed` is set. The split minimizes the cost of
    the most expensive part. Ties are broken by the smallest sum of the squared costs, which balances the other parts.
    """
    length = len(costs)
    cost_before, needed_before = [0.0, *accumulate(costs)], [0, *accumulate(map(int, is_needed))]
    positions = [position for position in sorted(set(allowed_positions)) if 0 < position < length]
    ends = [*positions, length]

    def find_best_split(
        max_cost: float, combine: Callable[[float, float], float]
    ) -> tuple[float, tuple[int, ...]] | None:
        """Find the split with the smallest total cost, as combined by `combine`. Each part costs at most `max_cost`.

        Returns the total cost and the positions, or None if there is no such split.
        """
        # best[end] is the best split of the items before `end`. Each iteration adds one part to each split.
        best: dict[int, tuple[float, tuple[int, ...]]]
        best = {
            end: (combine(0.0, cost_before[end]), ())
            for end in ends
            if needed_before[end] and cost_before[end] <= max_cost
        }
        for _ in range(num_parts - 1):
            rows = {
                end: [
                    (combine(best[start][0], cost_before[end] - cost_before[start]), (*best[start][1], start))
                    for start in positions
                    if start < end and start in best and needed_before[end] > needed_before[start]
                    if cost_before[end] - cost_before[start] <= max_cost
                ]
                for end in ends
            }
            best = {end: min(row) for end, row in rows.items() if row}
        return best.get(length)

    # First minimize the maximum, then the sum of squares. A single pass with both criteria would be wrong, because the
    # first parts of an optimal split aren't always an optimal split of their items.
    minimal = find_best_split(math.inf, max)
    split = minimal and find_best_split(minimal[0], lambda total, cost: total + cost * cost)
    return None if split is None else list(split[1])
