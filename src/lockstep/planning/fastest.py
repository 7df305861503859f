"""`placement.strategy: fastest`: the strategy whose step takes the least time here, measured before the run starts.

All that promise the same bits are surveyed; of those that fit, the best few are tried with all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from lockstep.common import plainfile
from lockstep.common.text import size, step_time
from lockstep.config.blame import with_places
from lockstep.config.document import mapping_at, parse
from lockstep.config.load import Loaded
from lockstep.config.placement import Placement, StrategyConfig
from lockstep.config.run import PredictedConfig, RunConfig
from lockstep.device import host
from lockstep.errors import UsageError
from lockstep.planning.survey import (
    Machine,
    Placed,
    as_predicted,
    largest,
    made_ready,
    survey,
    with_placement,
    with_strategy,
)
from lockstep.planning.table import in_order, refused
from lockstep.run.build import Setup
from lockstep.run.resolved import resolve
from lockstep.run.runs import CONFIG

_KEY: Final = "placement.strategy: fastest"
_TRIED: Final = 3  # strategies, with all ranks
_LARGEST: Final = 1 << 18  # bytes of a config.yaml


def with_fastest(loaded: Loaded, tell: Callable[[str], None]) -> tuple[Loaded, str]:
    """Return the configuration under the fastest strategy, with what it is predicted to take, and words on the choice.

    A run that goes on keeps the one that was measured for so many processes. UsageError where nothing fits. `tell` is
    called with what is measured.
    """
    with with_places(loaded):
        for option in loaded.config.placement.strategy.model_extra or {}:
            raise UsageError(f"placement.strategy.{option}: fastest has no options; leave it out")
        count = resolve(loaded.changed("placement", {"strategy": StrategyConfig()})).processes
        predicted = _of_run(loaded, count)
        if predicted is not None:
            words = f"{_KEY}: {predicted.strategy}, as it was measured before"
        else:
            machine = Machine(memory=room(loaded.config.placement, count))
            tried = measured(loaded, count, machine, tell)
            best, *others = sorted(tried, key=lambda row: row.seconds or 0.0)
            predicted = as_predicted(best)
            compared = "".join(f", {row.strategy} {step_time(row.seconds or 0.0)}" for row in others)
            words = f"{_KEY}: {best.strategy}, {step_time(predicted.step_s)} a step{compared}"
    return placed(loaded, StrategyConfig(name=predicted.strategy), predicted), words


def measured(loaded: Loaded, count: int, machine: Machine, tell: Callable[[str], None]) -> list[Placed]:
    """Return the best of the placements on so many processes that fit the machine, each as all its ranks took it."""
    ready = made_ready(loaded)
    rows = in_order(survey(loaded, ready, (), (count,), machine, tell), machine)
    found: list[Placed] = []
    for row in (each for each in rows if each.fits(machine)):
        tried = _with_all_ranks(row, loaded, ready, tell)
        rows[rows.index(row)] = tried
        found += [tried] if tried.fits(machine) else []
        if len(found) == _TRIED:
            break
    if not found:
        raise UsageError(_none_fits(rows, machine.memory or 0))
    return found


def placed(loaded: Loaded, strategy: StrategyConfig, predicted: PredictedConfig) -> Loaded:
    """Return the configuration under a strategy that was measured, which is where its keys come from."""
    found = with_strategy(loaded, strategy, predicted.processes).changed("run", {"predicted": predicted})
    keys = ["placement.strategy.name", "placement.processes"]
    keys += [f"run.predicted.{name}" for name in PredictedConfig.model_fields]
    return replace(found, origins={**loaded.origins, **dict.fromkeys(keys, "measured")})


def room(placement: Placement, processes: int) -> int:
    """Return the bytes that each of so many ranks may have here: of its card, else an equal part of what is free."""
    if placement.device != "cpu" and (cards := torch.cuda.device_count()):
        least = min(torch.cuda.get_device_properties(number).total_memory for number in range(cards))
        return int(least) // -(-processes // cards)  # ranks may share a card
    found = host.memory()
    free, limit = found["free"] or 0, found["limit"]
    return min(free, free if limit is None else limit) // processes


def _of_run(loaded: Loaded, count: int) -> PredictedConfig | None:
    """Return what was measured for the run that this start goes on with, if it was for so many processes."""
    file = _recorded_config(loaded.config.run)
    if file is None:
        return None
    try:
        values = parse(plainfile.content(file, _LARGEST).decode(), str(file)).values
        predicted = PredictedConfig.model_validate(mapping_at(mapping_at(values, "run"), "predicted"))
    except (OSError, ValueError):  # which cannot be read, or has none
        return None
    return predicted if predicted.processes == count else None


def _recorded_config(run: RunConfig) -> Path | None:
    """Return the configuration of the run that goes on, None where none does.

    The run may be named, or one of its checkpoints.
    """
    files: tuple[Path, ...] = ()
    if run.resume == "auto":
        files = (Path(run.dir) / CONFIG,) if run.dir else ()
    elif run.resume != "never":
        files = (Path(run.resume) / CONFIG, Path(run.resume).parent.parent / CONFIG)
    return next((file for file in files if file.exists()), None)


def _with_all_ranks(row: Placed, loaded: Loaded, ready: Setup, tell: Callable[[str], None]) -> Placed:
    """Measure a placement as the run would have it, where that is not what was measured."""
    if not row.pretended:
        return row
    tell(f"{row.strategy} on {row.processes}, all ranks")
    resolved = resolve(with_placement(loaded, StrategyConfig(name=row.strategy), row.processes), row.processes)
    figures, reason = largest(resolved, ready, None)
    seconds = None if figures is None else figures.seconds
    return replace(row, figures=figures, reason=reason, pretended=False, seconds=seconds)


def _none_fits(rows: Sequence[Placed], memory: int) -> str:
    peaks = {row.figures.peak: row for row in rows if row.figures is not None}
    if not peaks:
        return "\n".join([f"{_KEY}: nothing could be measured:", *refused(rows)])
    nearest = peaks[min(peaks)]
    return (
        f"{_KEY}: nothing fits on {nearest.processes} processes; {nearest.strategy} comes nearest, with "
        f"{size(min(peaks))} a rank where {size(memory)} are free; use more processes, placement.recompute or "
        f"placement.offload_activations"
    )
