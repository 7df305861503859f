"""Trains a recipe to completion on several placements, one after another, and collects the results."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.comparison.plan import (
    ComparisonRequest,
    PlannedRun,
    Strategy,
    make_comparison_path,
    parse_processes,
    plan_runs,
)
from lockstep.comparison.result import Comparison, ResultRow
from lockstep.errors import LockstepError
from lockstep.reporting import jsonl
from lockstep.reporting.run_log import History, build_history
from lockstep.run.background import to_arguments, train_in_background
from lockstep.runs.runs import describe_machine
from lockstep.setup.completed import make_completion_notice
from lockstep.training.events import Started, Stepped, Stopped

_MAX_REASON_CHARS: Final = 500

ShowComparison = Callable[[Comparison], None]


def compare(
    recipe: str | Path,
    *,
    placements: Sequence[str | Strategy] = ("ddp",),
    processes: Sequence[int] = (1, 2),
    overrides: Mapping[str, Any] | None = None,
    also: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    dir: str | Path | None = None,
) -> Comparison:
    """Train a recipe on each placement, as `lockstep compare` does.

    - `recipe`: The name of a built-in recipe, or a recipe file.
    - `placements`: Strategies, by name or as mappings with `name` and options.
    - `processes`: The numbers of processes. A single process always runs first. After that, each strategy runs on each
      number above 1, and data_parallel on one process.
    - `also`: Overrides to compare. All placements are trained again with each of them. Pass a mapping, or a list of
      mappings for several values of the same key.
    - `dir`: The folder for the runs. Defaults to a new folder in runs/. Completed runs in this folder are not repeated.

    If a run fails, its row contains the reason. If a placement isn't possible, UsageError is raised before any run
    starts.
    """
    strategies = tuple({"name": placement} if isinstance(placement, str) else placement for placement in placements)
    counts = parse_processes(",".join(map(str, processes)))
    folder = make_comparison_path(str(recipe)) if dir is None else Path(dir)
    variant_overrides = [also] if isinstance(also, Mapping) else also or ()
    override_words, variants = (
        tuple(to_arguments(overrides)),
        tuple(word for override in variant_overrides for word in to_arguments(override)),
    )
    threads = torch.get_num_threads()
    try:
        request = ComparisonRequest(str(recipe), override_words, strategies, counts, variants, folder)
        return run_all(plan_runs(request), lambda _: None)
    finally:
        torch.set_num_threads(threads)


def run_all(plans: Sequence[PlannedRun], show: ShowComparison) -> Comparison:
    """Run the planned runs in subprocesses, one after another, and return the results. Completed runs aren't repeated.

    `show` is called with the updated comparison after each event. If a run fails, its row contains the reason.
    """
    comparison = Comparison(plans[0].loaded.name, tuple(_make_initial_row(plan) for plan in plans))
    for number, plan in enumerate(plans):
        if comparison.rows[number].state == "done":
            continue

        def show_row(row: ResultRow, number: int = number) -> None:
            nonlocal comparison
            rows = (*comparison.rows[:number], row, *comparison.rows[number + 1 :])
            comparison = replace(comparison, rows=rows)
            show(comparison)

        show_row(_train_placement(plan, show_row))
    return replace(comparison, machine=describe_machine(Path(plans[0].row.folder)))


def _make_initial_row(plan: PlannedRun) -> ResultRow:
    if not make_completion_notice(plan.loaded):
        return plan.row
    return replace(plan.row, state="done", history=_read_history(plan.row))


def _train_placement(plan: PlannedRun, show: Callable[[ResultRow], None]) -> ResultRow:
    """Execute a planned run, and return its final row. `show` is called with the updated row after each event."""
    row = replace(plan.row, state="running")
    show(row)
    start_time, start_step = time.time(), 0
    reason = "it ended without a result"
    try:
        # If the user interrupts the comparison, `closing` ends the processes of the run immediately.
        with closing(train_in_background(plan.loaded, plan.train)) as events:
            for event in events:
                if isinstance(event, Started):
                    start_time, start_step = time.time(), event.step
                    row = replace(row, step=event.step, steps=event.steps)
                reason = f"stopped by {event.reason}" if isinstance(event, Stopped) else reason
                if isinstance(event, Stepped) and event.step > start_step:  # estimate the remaining time
                    elapsed_s = time.time() - start_time
                    left_s = elapsed_s / (event.step - start_step) * (row.steps - event.step)
                    row = replace(row, step=event.step, left_s=left_s, history=History(seconds=elapsed_s))
                show(row)
    except LockstepError as error:
        reason = str(error).partition("\n")[0][:_MAX_REASON_CHARS]
    final_history = _read_history(plan.row)
    if final_history.weights_sha256:
        return replace(row, state="done", left_s=None, history=final_history)
    return replace(row, state="failed", left_s=None, reason=reason, history=final_history)


def _read_history(row: ResultRow) -> History:
    return build_history(jsonl.Tail(Path(row.folder) / jsonl.EVENTS, strict=True).read_new_events())
