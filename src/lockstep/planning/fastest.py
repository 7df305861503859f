"""Implements `placement.strategy: fastest`, which selects the strategy with the shortest step on this machine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lockstep.common import plainfile
from lockstep.common.text import size, step_time
from lockstep.config.blame import add_key_positions
from lockstep.config.document import mapping_at, parse
from lockstep.config.load import Loaded
from lockstep.config.placement import StrategyConfig
from lockstep.config.recorded import CONFIG
from lockstep.config.run import PredictedConfig, RunConfig
from lockstep.errors import UsageError
from lockstep.planning.survey import (
    Machine,
    PlacementEstimate,
    as_predicted,
    memory_per_rank,
    open_for_survey,
    survey,
    with_strategy,
)
from lockstep.planning.table import in_order, refused
from lockstep.runs.remote import recorded_file
from lockstep.setup.resolved import local_processes

_KEY: Final = "placement.strategy: fastest"
_MAX_CONFIG_BYTES: Final = 1 << 18  # maximum size of a config.yaml in bytes


def with_fastest(loaded: Loaded, tell: Callable[[str], None]) -> tuple[Loaded, str]:
    """Return the configuration with the fastest strategy and its prediction, and a message about the choice.

    A resumed run keeps the strategy that was selected before, if the number of processes is the same. `tell` is
    called with each placement that is measured. Raises UsageError if no strategy fits into memory.
    """
    with add_key_positions(loaded):
        for option in loaded.config.placement.strategy.model_extra or {}:
            raise UsageError(f"placement.strategy.{option}: fastest has no options; remove it")
        count = local_processes(loaded.changed("placement", {"strategy": StrategyConfig()}).config)
        predicted = _recorded_prediction(loaded, count)
        if predicted is not None:
            message = f"{_KEY}: {predicted.strategy}, as measured before"
        else:
            machine = Machine(memory=memory_per_rank(loaded.config.placement, count))
            rows = in_order(survey(loaded, open_for_survey(loaded), (), (count,), machine, tell), machine)
            fitting_rows = [row for row in rows if row.fits(machine)]
            if not fitting_rows:
                raise UsageError(_no_fit_message(rows, machine.memory or 0))
            best, *slower_rows = fitting_rows
            predicted = as_predicted(best)
            compared = "".join(f", {row.strategy} {step_time(row.seconds or 0.0)}" for row in slower_rows)
            message = f"{_KEY}: {best.strategy}, {step_time(predicted.step_s)} a step{compared}"
    configuration = with_strategy(loaded, StrategyConfig(name=predicted.strategy), count)
    configuration = configuration.changed("run", {"predicted": predicted})
    keys = ["placement.strategy.name", "placement.processes"]
    keys += [f"run.predicted.{name}" for name in PredictedConfig.model_fields]
    return replace(configuration, origins={**loaded.origins, **dict.fromkeys(keys, "measured")}), message


def _recorded_prediction(loaded: Loaded, count: int) -> PredictedConfig | None:
    """Return the recorded prediction of the run that is resumed.

    Returns None if there is no prediction, or if it is for a different number of processes.
    """
    file = _recorded_config(loaded.config.run)
    if file is None:
        return None
    try:
        values = parse(plainfile.content(file, _MAX_CONFIG_BYTES).decode(), str(file)).values
        predicted = PredictedConfig.model_validate(mapping_at(mapping_at(values, "run"), "predicted"))
    except (OSError, ValueError):  # unreadable, or without a prediction
        return None
    return predicted if predicted.processes == count else None


def _recorded_config(run: RunConfig) -> Path | None:
    """Return the configuration file of the run that is resumed, or None if a new run starts.

    `run.resume` may be the run folder or a checkpoint in it.
    """
    files: tuple[Path, ...] = ()
    if run.resume == "auto":
        files = (recorded_file(run.dir, CONFIG),) if run.dir else ()
    elif run.resume != "never":
        files = (recorded_file(run.resume, CONFIG), Path(run.resume).parent.parent / CONFIG)
    return next((file for file in files if file.exists()), None)


def _no_fit_message(rows: Sequence[PlacementEstimate], memory: int) -> str:
    peaks = {row.figures.peak: row for row in rows if row.figures is not None}
    if not peaks:
        return "\n".join([f"{_KEY}: no strategy could be measured:", *refused(rows)])
    nearest = peaks[min(peaks)]
    return (
        f"{_KEY}: no strategy fits on {nearest.processes} processes; {nearest.strategy} needs the least memory, "
        f"{size(min(peaks))} per rank of {size(memory)} free; use more processes, placement.recompute or "
        f"placement.offload_activations"
    )
