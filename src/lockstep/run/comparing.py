"""`lockstep compare` below its options: one recipe trained to its end under several placements, one after the other."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.config.blame import with_places
from lockstep.config.document import parse
from lockstep.config.load import Loaded, load, recorded
from lockstep.config.recipe import Recipe
from lockstep.config.write import flow
from lockstep.errors import LockstepError, UsageError
from lockstep.reporting import jsonl
from lockstep.reporting.comparison import Comparison, Row
from lockstep.reporting.run_log import History, history
from lockstep.reporting.usual import USUAL
from lockstep.run.aside import Train, as_words, trained
from lockstep.run.build import Setup, setup
from lockstep.run.checks import check_cut, check_kernels, check_placement
from lockstep.run.finished import finished
from lockstep.run.first_weights import opened
from lockstep.run.resolved import resolve
from lockstep.run.resume import check_first, check_recipe
from lockstep.run.runs import CONFIG, machine_of
from lockstep.run.sinks import check_sinks
from lockstep.run.training import train_here
from lockstep.run.usual import as_seen, check_usual, train_usual
from lockstep.training.events import Event, Started, Stepped, Stopped

_SINGLE: Final = "single"
_OURS: Final = ("placement.strategy", "placement.processes", "run.dir", "run.resume")  # keys that are set here
_LONGEST: Final = 80  # characters of a part of a folder's name
_LONGEST_REASON: Final = 500

Tell = Callable[[Comparison], None]
Strategy = Mapping[str, Any]  # its name, and its options beside it


@dataclass(frozen=True)
class Asked:
    """What is to be compared: a recipe with overrides, strategies, numbers of processes, and other recipes.

    Each of `variants` is an override by which the recipe is compared too, such as `recipe.batchnorm=sync`. With `usual`
    it is also trained as the usual script does.
    """

    source: str
    overrides: tuple[str, ...]
    placements: tuple[Strategy, ...]
    processes: tuple[int, ...]
    variants: tuple[str, ...]
    folder: Path
    usual: bool = False


@dataclass(frozen=True)
class Planned:
    """A placement that can run, what it is called, and what trains it."""

    loaded: Loaded
    row: Row
    body: Train = train_here


def placements_in(text: str) -> tuple[Strategy, ...]:
    """Return the strategies of a list such as `ddp,zero3,{name: hsdp, replicate: 2}`."""
    read = parse(f"[{text}]", "--placements")
    listed = read.values if isinstance(read.values, list) and not read.problems else []
    found = [{"name": each} if isinstance(each, str) else each for each in listed]
    if not found or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in found):
        raise UsageError(f"--placements {text}: expected strategies, such as ddp,zero3,{{name: hsdp, replicate: 2}}")
    return tuple(found)


def processes_in(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `1,2,4`."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise UsageError(f"--processes {text}: expected whole numbers from 1, such as 1,2,4")
    return tuple(map(int, numbers))


def folder_for(source: str) -> Path:
    """Return a folder that is not there yet, for a comparison that begins now."""
    name = f"compare-{_slug(Path(source).stem)}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (f"{name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(path for path in (Path("runs") / each for each in names) if not path.exists())


def planned(asked: Asked) -> list[Planned]:
    """Return the placements to run: for each recipe first one process, to which the others are compared.

    On one process all strategies are `single`, which runs once. What cannot run raises UsageError before anything does,
    with all reasons together.
    """
    _check_overrides((*asked.overrides, *asked.variants))
    torch.set_num_threads(1)  # forked processes must not inherit a pool of threads
    pairs = [
        ({"name": _SINGLE}, 1),
        *((each, count) for each in asked.placements for count in asked.processes if count > 1),
    ]
    unique = [pair for number, pair in enumerate(pairs) if pair not in pairs[:number]]
    plans, problems = [], []
    seen: list[Recipe] = []  # by the usual script
    for variant in ("", *dict.fromkeys(asked.variants)):
        recipe = (*asked.overrides, *([variant] if variant else []))
        loaded = load(asked.source, [*recipe, *_placed({"name": _SINGLE}, 1)])
        ready = _ready(loaded)
        for strategy, count in unique:
            try:
                plans.append(_plan(asked, recipe, variant, strategy, count, ready))
            except UsageError as error:
                problems.append(f"{_named(strategy)} on {count}{f', {variant}' if variant else ''}: {error}")
        script = as_seen(loaded.config.recipe)
        for count in asked.processes if asked.usual and script not in seen else ():
            try:
                plans.append(_usual_plan(asked, recipe, variant, count, ready))
            except UsageError as error:
                problems.append(str(error))
        seen.append(script)
    if problems:
        raise UsageError("\n".join(["these placements cannot run, so none was started:", *dict.fromkeys(problems)]))
    return plans


def compare(
    recipe: str | Path,
    *,
    placements: Sequence[str | Strategy] = ("ddp",),
    processes: Sequence[int] = (1, 2),
    overrides: Mapping[str, Any] | None = None,
    also: Mapping[str, Any] | None = None,
    usual: bool = False,
    dir: str | Path | None = None,
) -> Comparison:
    """Train a recipe, the name of a shipped one or a file, under each placement, as `lockstep compare` does.

    `placements` are strategies, by name or as mappings of `name` and options. Each of `also` is an override by which
    all are trained once more, `usual` asks for the usual script beside them. The runs are in `dir`, left out a fresh
    folder in runs/; what is finished there is only read. A run that fails is a row that says why; what cannot run
    raises UsageError before anything does.
    """
    strategies = tuple({"name": each} if isinstance(each, str) else each for each in placements)
    counts = processes_in(",".join(map(str, processes)))
    folder = folder_for(str(recipe)) if dir is None else Path(dir)
    words, variants = tuple(as_words(overrides)), tuple(as_words(also))
    threads = torch.get_num_threads()
    try:
        return run_all(planned(Asked(str(recipe), words, strategies, counts, variants, folder, usual)), lambda _: None)
    finally:
        torch.set_num_threads(threads)


def run_all(plans: Sequence[Planned], tell: Tell) -> Comparison:
    """Train each placement to its end, in processes aside, and return what came of them; a finished run is only read.

    `tell` is called with all of it whenever something happened. A run that fails becomes a row that says so.
    """
    comparison = Comparison(plans[0].loaded.name, tuple(_begun(plan) for plan in plans))
    for number, plan in enumerate(plans):
        if comparison.rows[number].state == "done":
            continue

        def tell_row(row: Row, number: int = number) -> None:
            nonlocal comparison
            rows = (*comparison.rows[:number], row, *comparison.rows[number + 1 :])
            comparison = replace(comparison, rows=rows)
            tell(comparison)

        tell_row(_run(plan, tell_row))
    return replace(comparison, machine=machine_of(Path(plans[0].row.folder)))


def _begun(plan: Planned) -> Row:
    if not finished(plan.loaded):
        return plan.row
    return replace(plan.row, state="done", history=_history(plan.row))


def _run(plan: Planned, tell: Callable[[Row], None]) -> Row:
    """Train a placement; `tell` is called with its row as it is now."""
    row = replace(plan.row, state="running")
    tell(row)
    began, first = time.time(), 0
    reason = "it ended without a result"
    try:
        with closing(trained(plan.loaded, plan.body)) as events:  # an interruption ends the processes at once
            for event in events:
                if isinstance(event, Started):
                    began, first = time.time(), event.step
                    row = replace(row, step=event.step, steps=event.steps)
                reason = f"stopped by {event.reason}" if isinstance(event, Stopped) else reason
                row = _moved(row, event, began, first)
                tell(row)
    except LockstepError as error:
        reason = _first_line(str(error))
    done = _history(plan.row)
    if done.weights_sha256:
        return replace(row, state="done", left_s=None, history=done)
    return replace(row, state="failed", left_s=None, reason=reason, history=done)


def _moved(row: Row, event: Event, began: float, first: int) -> Row:
    """Return the row of a run that has come to an event, with the time left if it goes on as it did."""
    if not isinstance(event, Stepped) or event.step <= first:
        return row
    passed = time.time() - began
    left = passed / (event.step - first) * (row.steps - event.step)
    return replace(row, step=event.step, left_s=left, history=History(seconds=passed))


def _history(row: Row) -> History:
    log = Path(row.folder) / jsonl.EVENTS
    return history(jsonl.read(log)) if log.exists() else History()


def _ready(loaded: Loaded) -> Setup:
    """Check what all placements of a recipe have in common, and return what the recipe is made of."""
    with with_places(loaded):
        loaded, first = opened(loaded)
        check_sinks(loaded.config.run)
        ready = setup(loaded.config.recipe, first)
        check_first(ready)
    return ready


def _plan(asked: Asked, recipe: Sequence[str], variant: str, strategy: Strategy, count: int, ready: Setup) -> Planned:
    """Return the plan of a placement, or raise UsageError where it cannot run."""
    folder, loaded = _in_folder(asked, recipe, variant, _named(strategy), strategy, count)
    resolved = resolve(loaded)
    check_placement(resolved)
    check_cut(resolved, ready)
    check_kernels(resolved.placement, ready)
    promises = resolved.strategy.traits.exactness
    return Planned(loaded, Row(_named(strategy), count, variant, str(folder), promises))


def _usual_plan(asked: Asked, recipe: Sequence[str], variant: str, count: int, ready: Setup) -> Planned:
    """Return the plan of the usual script, which promises nothing, or raise UsageError where it cannot run."""
    strategy = {"name": "ddp" if count > 1 else _SINGLE}
    folder, loaded = _in_folder(asked, recipe, variant, USUAL, strategy, count)
    check_usual(loaded.config.recipe, ready, resolve(loaded).processes)
    return Planned(loaded, Row(USUAL, count, variant, str(folder), "none"), train_usual)


def _in_folder(
    asked: Asked, recipe: Sequence[str], variant: str, name: str, strategy: Strategy, count: int
) -> tuple[Path, Loaded]:
    """Return the folder of a run and its configuration; what is there of another recipe raises UsageError."""
    folder = asked.folder / _slug("-".join([*([variant] if variant else []), name, str(count)]))
    kept = (f"run.dir={flow(str(folder))}", "run.resume=auto")
    loaded = load(asked.source, [*recipe, *_placed(strategy, count), *kept])
    if (folder / CONFIG).exists():
        check_recipe(folder, recorded(folder / CONFIG), loaded.config.recipe)
    return folder, loaded


def _placed(strategy: Strategy, count: int) -> tuple[str, str]:
    return f"placement.strategy={flow(strategy)}", f"placement.processes={count}"


def _named(strategy: Strategy) -> str:
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


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:_LONGEST_REASON]
