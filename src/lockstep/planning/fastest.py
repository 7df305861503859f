"""Implements `placement.strategy: fastest`, which selects the strategy with the shortest step time on this machine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lockstep.common import plainfile
from lockstep.common.text import format_bytes, format_step_time
from lockstep.config.document import get_mapping, parse
from lockstep.config.error_positions import add_key_positions
from lockstep.config.load import LoadedConfig
from lockstep.config.placement import StrategyConfig
from lockstep.config.recorded import CONFIG_NAME
from lockstep.config.run import PredictedConfig, RunConfig
from lockstep.errors import UsageError
from lockstep.planning.survey import (
    Machine,
    PlacementEstimate,
    get_memory_per_rank,
    open_for_survey,
    survey,
    to_prediction,
    with_strategy,
)
from lockstep.planning.table import format_unmeasured_placements, sort_rows
from lockstep.runs.remote import fetch_file
from lockstep.setup.resolved import count_local_processes

_KEY: Final = "placement.strategy: fastest"
_MAX_CONFIG_BYTES: Final = 1 << 18  # maximum size of a config.yaml file to read


def select_fastest(loaded: LoadedConfig, report: Callable[[str], None]) -> tuple[LoadedConfig, str]:
    """Select the fastest strategy. Return a configuration with this strategy and its prediction, and a message.

    A resumed run keeps the previously selected strategy, unless the number of processes has changed. `report` is called
    with each placement before it is measured. Raises UsageError if no strategy fits into memory.
    """
    with add_key_positions(loaded):
        for option in loaded.config.placement.strategy.model_extra or {}:
            raise UsageError(f"placement.strategy.{option}: fastest has no options; remove it")
        count = count_local_processes(loaded.replace_values("placement", {"strategy": StrategyConfig()}).config)
        predicted = _read_recorded_prediction(loaded, count)
        if predicted is not None:
            message = f"{_KEY}: {predicted.strategy}, as measured before"
        else:
            machine = Machine(memory=get_memory_per_rank(loaded.config.placement, count))
            rows = sort_rows(survey(loaded, open_for_survey(loaded), (), (count,), machine, report), machine)
            fitting_rows = [row for row in rows if row.fits(machine)]
            if not fitting_rows:
                raise UsageError(_make_no_fit_message(rows, machine.memory or 0))
            best, *slower_rows = fitting_rows
            predicted = to_prediction(best)
            compared = "".join(f", {row.strategy} {format_step_time(row.seconds or 0.0)}" for row in slower_rows)
            message = f"{_KEY}: {best.strategy}, {format_step_time(predicted.step_s)} a step{compared}"
    configuration = with_strategy(loaded, StrategyConfig(name=predicted.strategy), count)
    configuration = configuration.replace_values("run", {"predicted": predicted})
    keys = ["placement.strategy.name", "placement.processes"]
    keys += [f"run.predicted.{name}" for name in PredictedConfig.model_fields]
    return replace(configuration, origins={**loaded.origins, **dict.fromkeys(keys, "measured")}), message


def _read_recorded_prediction(loaded: LoadedConfig, count: int) -> PredictedConfig | None:
    """Return the prediction that the run to resume recorded when it was started.

    Returns None for a new run, if no prediction was recorded, or if the number of processes has changed.
    """
    file = _find_recorded_config(loaded.config.run)
    if file is None:
        return None
    try:
        values = parse(plainfile.read_bytes(file, _MAX_CONFIG_BYTES).decode(), str(file)).values
        predicted = PredictedConfig.model_validate(get_mapping(get_mapping(values, "run"), "predicted"))
    except (OSError, ValueError):  # unreadable, or without a prediction
        return None
    return predicted if predicted.processes == count else None


def _find_recorded_config(run: RunConfig) -> Path | None:
    """Return the configuration file of the run to resume, or None if a new run starts.

    `run.resume` may be the run folder or a checkpoint in it.
    """
    files: tuple[Path, ...] = ()
    if run.resume == "auto":
        files = (fetch_file(run.dir, CONFIG_NAME),) if run.dir else ()
    elif run.resume != "never":
        files = (fetch_file(run.resume, CONFIG_NAME), Path(run.resume).parent.parent / CONFIG_NAME)
    return next((file for file in files if file.exists()), None)


def _make_no_fit_message(rows: Sequence[PlacementEstimate], memory_bytes: int) -> str:
    peaks = {row.figures.peak: row for row in rows if row.figures is not None}
    if not peaks:
        return "\n".join([f"{_KEY}: no strategy could be measured:", *format_unmeasured_placements(rows)])
    smallest = peaks[min(peaks)]
    return (
        f"{_KEY}: no strategy fits on {smallest.processes} processes; {smallest.strategy} needs the least memory, "
        f"{format_bytes(min(peaks))} per rank, but only {format_bytes(memory_bytes)} is free; use more processes, "
        "placement.recompute or placement.offload_activations"
    )
