"""The placements under which a recipe is to be compared, each checked before any of them is started."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.comparison.result import ResultRow
from lockstep.config.base import values
from lockstep.config.blame import with_places
from lockstep.config.document import mapping_at, parse
from lockstep.config.load import Loaded, load, read_run_recipe
from lockstep.config.overrides import SHORTHAND
from lockstep.config.recorded import CONFIG
from lockstep.config.write import flow
from lockstep.errors import UsageError
from lockstep.run.background import Train
from lockstep.run.sinks import check_sinks
from lockstep.run.training import train_here
from lockstep.runs.folder import fresh_folder
from lockstep.setup.build import Setup
from lockstep.setup.checks import check_cut
from lockstep.setup.prepare import check, open_unplaced
from lockstep.setup.resume import check_recipe

_SINGLE: Final = "single"
_OURS: Final = ("placement.strategy", "placement.processes", "run.dir", "run.resume")  # keys that are set here
_USUAL: Final = ("usual script", "usual", "naive_ddp")
USUAL_MOVED: Final = "the usual script is a benchmark now: python -m benchmarks.naive_ddp RECIPE --processes 1,2,4"
_LONGEST: Final = 80  # characters of a part of a folder's name

Strategy = Mapping[str, Any]  # its name, and its options beside it


@dataclass(frozen=True)
class ComparisonRequest:
    """What is to be compared: a recipe with overrides, strategies, numbers of processes, and other recipes.

    Each of `variants` is an override by which the recipe is compared too, such as `recipe.batchnorm=sync`.
    """

    source: str
    overrides: tuple[str, ...]
    placements: tuple[Strategy, ...]
    processes: tuple[int, ...]
    variants: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class PlannedRun:
    """A placement that can run, what it is called, and what trains it."""

    loaded: Loaded
    row: ResultRow
    body: Train = train_here


def placements_in(text: str) -> tuple[Strategy, ...]:
    """Return the strategies of a list such as `ddp,zero3,{name: hsdp, replicate: 2}`."""
    read = parse(f"[{text}]", "--placements")
    listed = read.values if isinstance(read.values, list) and not read.problems else []
    found = [{"name": each} if isinstance(each, str) else each for each in listed]
    if not found or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in found):
        raise UsageError(f"--placements {text}: expected strategies, such as ddp,zero3,{{name: hsdp, replicate: 2}}")
    if any(each["name"] in _USUAL for each in found):
        raise UsageError(f"--placements {text}: {USUAL_MOVED}")
    return tuple(found)


def processes_in(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `1,2,4`."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise UsageError(f"--processes {text}: expected whole numbers from 1, such as 1,2,4")
    return tuple(map(int, numbers))


def folder_for(source: str) -> Path:
    """Return a folder that is not there yet, for a comparison that begins now."""
    return fresh_folder(f"compare-{_slug(Path(source).stem)}")


def plan_runs(request: ComparisonRequest) -> list[PlannedRun]:
    """Return the placements to run: for each recipe first one process, to which the others are compared.

    On one process all strategies are `single`, which runs once. What cannot run raises UsageError before anything does,
    with all reasons together.
    """
    _check_overrides((*request.overrides, *request.variants))
    torch.set_num_threads(1)  # forked processes must not inherit a pool of threads
    single: tuple[Strategy, int] = ({"name": _SINGLE}, 1)
    pairs = [single, *((each, count) for each in request.placements for count in request.processes if count > 1)]
    unique = [pair for number, pair in enumerate(pairs) if pair not in pairs[:number]]
    plans: list[PlannedRun] = []
    problems: list[str] = []
    keys = dict.fromkeys(each.partition("=")[0].strip() for each in request.variants)
    for variant, loaded in _variants(request, _placement_overrides(*single)):
        ready = _ready(loaded)
        called = variant or ", ".join(_given(loaded, key) for key in keys)
        of = f", {called}" if called else ""
        for strategy, count in unique:
            name = _strategy_label(strategy)
            try:
                plan = _plan(request, variant, name, strategy, count, ready)
                plans.append(replace(plan, row=replace(plan.row, variant=called)))
            except UsageError as error:
                problems.append(f"{name} on {count}{of}: {error}")
    if problems:
        raise UsageError("\n".join(["these placements cannot run, so none was started:", *dict.fromkeys(problems)]))
    return plans


def _variants(request: ComparisonRequest, placement: Sequence[str]) -> list[tuple[str, Loaded]]:
    """Return the recipes to compare with their overrides: first the one that was given, and no two that are alike."""
    found: list[tuple[str, Loaded]] = []
    for variant in ("", *request.variants):
        loaded = load(request.source, [*_overrides(request, variant), *placement])
        if all(loaded.config != other.config for _, other in found):
            found.append((variant, loaded))
    return found


def _given(loaded: Loaded, key: str) -> str:
    """Return what a recipe has for a key, in the form of an override; of a section that a word stands for that word."""
    path = tuple(key.split("."))
    found = reduce(mapping_at, path[:-1], values(loaded.config)).get(path[-1])
    named = found.get(SHORTHAND[path]) if path in SHORTHAND and isinstance(found, dict) else found
    return f"{key}={flow(named)}"


def _overrides(request: ComparisonRequest, variant: str) -> tuple[str, ...]:
    return (*request.overrides, *([variant] if variant else []))


def _ready(loaded: Loaded) -> Setup:
    """Check what all placements of a recipe have in common, and return what the recipe is made of."""
    with with_places(loaded):
        check_sinks(loaded.config.run)
    return open_unplaced(loaded)


def _plan(
    request: ComparisonRequest, variant: str, name: str, strategy: Strategy, count: int, ready: Setup
) -> PlannedRun:
    """Return the plan of a placement, or raise UsageError where it cannot run, or its folder has another recipe."""
    folder = request.folder / _slug("-".join([*([variant] if variant else []), name, str(count)]))
    kept = (f"run.dir={flow(str(folder))}", "run.resume=auto")
    loaded = load(request.source, [*_overrides(request, variant), *_placement_overrides(strategy, count), *kept])
    if (folder / CONFIG).exists():
        check_recipe(folder, read_run_recipe(folder / CONFIG), loaded.config.recipe)
    resolved = check(loaded)
    check_cut(resolved, ready)
    return PlannedRun(loaded, ResultRow(name, count, variant, str(folder), resolved.strategy.traits.exactness))


def _placement_overrides(strategy: Strategy, count: int) -> tuple[str, str]:
    return f"placement.strategy={flow(strategy)}", f"placement.processes={count}"


def _strategy_label(strategy: Strategy) -> str:
    """Return a strategy's name, with its options if it has some."""
    options = ", ".join(f"{key}={flow(value)}" for key, value in strategy.items() if key != "name")
    return f"{strategy['name']} ({options})" if options else str(strategy["name"])


def _check_overrides(words: Sequence[str]) -> None:
    """Raise UsageError for overrides of what a comparison sets itself."""
    for word in words:
        key = word.partition("=")[0].strip()
        if any(key == each or key.startswith(f"{each}.") for each in _OURS):
            raise UsageError(
                f"{word}: lockstep compare sets {key} for each run; give strategies in --placements, numbers in "
                f"--processes, and the folder in --dir"
            )


def _slug(text: str) -> str:
    """Return text as a part of a path; where it had to be changed, with a hash, so that no two are alike."""
    slug = re.sub(r"[^\w.=-]+", "-", text).strip("-.")[:_LONGEST]
    return slug if slug == text else f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
