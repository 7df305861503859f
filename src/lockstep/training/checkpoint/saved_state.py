"""The content of state.json, with strict validation of its types and ranges, and of the progress that it records."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.common import schemas
from lockstep.core.order import Steps
from lockstep.errors import UsageError
from lockstep.tasks.base import Task
from lockstep.training.checkpoint import store
from lockstep.training.progress import Progress

_STRICT: Final = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
_MAX_PROBLEMS: Final = 5  # maximum number of problems listed for a file

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Metric = Annotated[float, Field(allow_inf_nan=True)]
Number = bool | Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | float | None


class _Progress(BaseModel):
    model_config = _STRICT

    step: Count
    epoch: Count
    samples: Count
    skipped_steps: Count
    figures: dict[str, Metric]
    best: dict[str, Metric]
    best_loss: Annotated[float, Field(allow_inf_nan=True)]  # infinite before the first evaluation
    best_at: Annotated[int, Field(ge=-1, lt=1 << 63)]


class SavedOptimizer(BaseModel):
    """The non-tensor part of an optimizer's state."""

    model_config = _STRICT

    slots: dict[str, Number]  # by `<parameter>/<slot>`
    groups: list[dict[str, Number]]  # parameter groups


class SavedEngine(BaseModel):
    """The non-tensor part of an engine's state."""

    model_config = _STRICT

    optimizer: SavedOptimizer
    loss_scale: dict[str, int | float]  # empty unless the precision is fp16


class SavedState(BaseModel):
    """The state in a checkpoint: the progress, the non-tensor state of the engine, and the inputs of the run.

    `recipe`, `numerics`, `data` and `source` record everything that affects the numerical results of the run.
    """

    model_config = _STRICT

    schema_: Literal[2] = Field(alias="schema")
    saved_progress: _Progress = Field(alias="progress")
    engine: SavedEngine
    recipe: dict[str, Any]
    numerics: dict[str, str | int | None]
    data: dict[str, Any]  # properties of the dataset
    source: dict[str, str]  # hashes of the user's source files

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        return Progress(**self.saved_progress.model_dump())


def parse_state(path: Path, state: Mapping[str, Any]) -> SavedState:
    """Validate `state`, the JSON content of state.json in the checkpoint `path`, and return it as a SavedState.

    Raises UsageError if the content doesn't match the format of this version, or if its step differs from the step in
    the folder name.
    """
    schemas.check_schema(state.get("schema"), path / store.STATE)
    try:
        saved = SavedState.model_validate(state)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg'].lower()}, got {repr(detail['input'])[:60]}"
            for detail in error.errors()[:_MAX_PROBLEMS]
        ]
        raise UsageError(
            "\n".join([f"{path / store.STATE}: does not match the format of this version:", *lines])
        ) from None
    named_step, step = store.parse_step(path), saved.progress.step
    if named_step not in (None, step):
        raise UsageError(
            f"{path}: the folder is named after step {named_step}, but contains step {step}; rename it to "
            f"{store.step_name(step)}, or remove it"
        )
    return saved


def find_progress_problems(progress: Progress, steps: Steps, task: Task, may_skip: bool) -> Iterator[str]:
    """Yield a description of each value in `progress` that isn't possible for a run with these `steps`.

    `task` determines which evaluation is the best. `may_skip` is whether the run may skip updates.
    """
    step = progress.step
    if step > steps.total:
        yield f"step {step}, but the run has {steps.total} steps"
        return
    last_step = steps[step - 1] if step else None
    epoch, samples = (last_step.epoch, last_step.samples_seen + last_step.samples) if last_step else (0, 0)
    if (progress.epoch, progress.samples) != (epoch, samples):
        actual = f"epoch {progress.epoch} and {progress.samples} samples"
        yield f"{actual} after step {step}, expected epoch {epoch} and {samples} samples"
    if progress.skipped_steps > (step if may_skip else 0):
        yield f"{progress.skipped_steps} skipped updates in {step} steps"
    monitor, has_best = task.monitor, progress.best_at > 0
    for section, figures in (("figures", progress.figures), ("best", progress.best)):
        if has_best and monitor.name not in (*figures, "loss"):
            yield f"{section} has {', '.join(figures) or 'nothing'}, but the run reports {monitor.name}"
            return
        for name in task.fractions:
            if not 0 <= figures.get(name, 0.0) <= 1:
                yield f"{section}: {name} is {figures[name]}, which is not between 0 and 1"
    latest, best = (figures.get(monitor.name, math.nan) for figures in (progress.figures, progress.best))
    if ((progress.figures or progress.best) and not has_best) or progress.best_at > step:
        yield f"best_at is {progress.best_at}, which does not match step {step} and the metrics of the best evaluation"
    elif not has_best and (progress.best_at != -1 or progress.best_loss != math.inf):
        yield f"best_at is {progress.best_at} and best_loss {progress.best_loss}, without a best evaluation"
    elif latest > best if monitor.higher else latest < best:
        yield f"the best {monitor.name} is {best}, but the last evaluation has {latest}, which is better"
