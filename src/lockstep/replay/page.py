"""Formats the results of a replay as lines for a terminal and as sections of an HTML page."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lockstep.replay.run import Replay, ReplayedStep
from lockstep.reporting import charts
from lockstep.reporting.jsonl import EVENTS, read_events
from lockstep.reporting.page import Paragraphs, Section, Table
from lockstep.training.observer import BATCH, LOSS, NonFinite, StepObservations

_MAX_LISTED_ITEMS: Final = 3  # maximum number of samples and layers shown on a terminal
_MAX_ROWS: Final = 200  # maximum number of rows in a table
_CONTEXT_STEPS: Final = 50  # number of logged steps to show in the chart before and after the replayed steps


def format_lines(replay: Replay) -> Iterator[str]:
    """Yield the lines to print on a terminal about a replay."""
    steps = [step.step for step in replay.steps]
    start = f"after step {replay.start_step}" if replay.start_step else "from the initial weights"
    placement = f"{replay.strategy} on {replay.processes} process{'es' if replay.processes > 1 else ''}"
    yield f"{replay.folder}  {_format_steps(steps)}  started {start}  {placement}"
    yield from _format_verdict(replay)
    if replay.end_reason:
        yield "loss      unknown: the script ended before the step was complete"
    else:
        yield f"loss      {replay.steps[-1].loss:.6g} at step {steps[-1]}, learning rate {replay.steps[-1].lr:.6g}"
    observations = replay.observations
    if observations is not None and observations.losses:
        losses = ", ".join(
            f"{replay.get_sample_name(sample_index)} {loss:.4g}"
            for sample_index, _, loss in _sort_samples(replay)[:_MAX_LISTED_ITEMS]
        )
        yield f"samples   {len(observations.losses)}; largest losses: {losses}"
    if observations is not None and observations.microbatch_losses:
        losses = ", ".join(
            f"micro-batch {index} {loss:.4g}" for index, loss in _sort_microbatches(observations)[:_MAX_LISTED_ITEMS]
        )
        yield f"samples   {sum(map(len, replay.sample_indices))}; largest losses: {losses}"
    if replay.parameter_norms:
        largest = sorted(replay.parameter_norms, key=lambda layer: _make_sort_key(layer.gradient))[:_MAX_LISTED_ITEMS]
        yield f"gradients largest in {', '.join(f'{layer.name} {layer.gradient:.3g}' for layer in largest)}"
    if observations is not None and observations.nonfinite is not None:
        yield f"first {_describe_nonfinite(replay, observations.nonfinite)}"
    nonfinite = [layer.name for layer in replay.parameter_norms if not math.isfinite(layer.weight)]
    if nonfinite:
        suffix = f" and {len(nonfinite) - 1} more" if len(nonfinite) > 1 else ""
        yield f"weights   {nonfinite[0]}{suffix} not finite before the step; replay an earlier step"


def _format_steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no step done"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _format_verdict(replay: Replay) -> Iterator[str]:
    compared = [step for step in replay.steps if step.recorded_digest is not None]
    first_difference = replay.first_difference
    if replay.start_matches is False:
        yield f"weights   after step {replay.start_step} do not match the digest of the run"
    if first_difference is not None:
        before = max((step.step for step in compared if step.step < first_difference.step), default=None)
        suffix = "" if before is None else f"; step {before} is still the same"
        yield f"digests   step {first_difference.step} differs from the run{suffix}"
        yield from (f"          {line}" for line in replay.machine_differences)
    elif compared:
        yield f"digests   {len(compared)} of {len(compared)} match the run: the same bits"
    else:
        yield "digests   none to compare: the run has no digest of these steps, or the recipe was changed"


def _make_sort_key(value: float) -> float:
    """Return a sort key for descending order. NaN sorts like infinity."""
    return -math.inf if math.isnan(value) else -value


def _sort_samples(replay: Replay) -> list[tuple[int, int, float]]:
    """Return the sample index, micro-batch index and loss of each sample, with the largest loss first."""
    assert replay.observations is not None
    rows = [
        (replay.sample_indices[sample.microbatch][sample.sample_index], sample.microbatch, sample.loss)
        for sample in replay.observations.losses
    ]
    return sorted(rows, key=lambda row: _make_sort_key(row[2]))


def _sort_microbatches(observations: StepObservations) -> list[tuple[int, float]]:
    """Return the index and loss of each micro-batch, with the largest loss first."""
    return sorted(observations.microbatch_losses.items(), key=lambda row: _make_sort_key(row[1]))


def _describe_nonfinite(replay: Replay, nonfinite: NonFinite) -> str:
    sample = (
        f", {replay.get_sample_name(replay.sample_indices[nonfinite.microbatch][nonfinite.sample_index])}"
        if nonfinite.sample_index >= 0
        else ""
    )
    location = f"micro-batch {nonfinite.microbatch}{sample}"
    if nonfinite.module == BATCH:
        return f"{nonfinite.kind} in the batch, as returned by the dataset, {location}"
    module = nonfinite.module if nonfinite.module == LOSS else f"module {nonfinite.module}"
    return f"{nonfinite.kind} in the {nonfinite.phase} of {module}, by {nonfinite.operation}, {location}"


def make_sections(replay: Replay) -> Iterator[Section]:
    """Yield the sections of an HTML page about a replay."""
    yield Paragraphs("", [*format_lines(replay)])
    yield from _make_loss_chart(replay)
    if len(replay.steps) > 1 or replay.observations is None:
        rows = [
            [str(step.step), f"{step.loss:.6g}", f"{step.lr:.6g}", f"{step.digest:016x}", _format_match(step)]
            for step in replay.steps[-_MAX_ROWS:]
        ]
        yield Table("Steps", ("step", "loss", "learning rate", "digest", "matches the run"), rows)
    observations = replay.observations
    if observations is not None:
        yield from _make_observation_tables(replay, observations)
    if replay.parameter_norms:
        rows = [
            [layer.name, f"{layer.weight:.4g}", f"{layer.gradient:.4g}", f"{layer.update:.4g}"]
            for layer in sorted(replay.parameter_norms, key=lambda layer: _make_sort_key(layer.gradient))[:_MAX_ROWS]
        ]
        note = "L2 norms; the gradient is divided by the weight of the step, and not clipped."
        yield Table("Parameters", ("name", "before the step", "gradient", "update"), rows, note)


def _format_match(step: ReplayedStep) -> str:
    return "unknown" if step.recorded_digest is None else "no" if step.differs else "yes"


def _make_observation_tables(replay: Replay, observations: StepObservations) -> Iterator[Section]:
    note = "Sorted by loss, largest first."
    if observations.microbatch_losses:
        names = [", ".join(map(replay.get_sample_name, sample_indices)) for sample_indices in replay.sample_indices]
        rows = [
            [str(index), f"{loss:.6g}", names[index]] for index, loss in _sort_microbatches(observations)[:_MAX_ROWS]
        ]
        yield Table("Micro-batches", ("micro-batch", "loss", "samples"), rows, note)
    if observations.losses:
        rows = [
            [replay.get_sample_name(sample_index), str(index), f"{loss:.6g}"]
            for sample_index, index, loss in _sort_samples(replay)[:_MAX_ROWS]
        ]
        yield Table("Samples", ("sample", "micro-batch", "loss"), rows, note)
    largest = sorted(observations.activations.items(), key=lambda activation: _make_sort_key(activation[1]))[:_MAX_ROWS]
    rows = [[name, f"{value:.4g}"] for name, value in largest]
    yield Table("Activations", ("module", "largest absolute value"), rows)


def _make_loss_chart(replay: Replay) -> Iterator[Section]:
    """Yield a chart that compares the replayed losses with the losses that the run logged around these steps."""
    steps = [step.step for step in replay.steps]
    if not steps:
        return
    logged = [
        (event["step"], float(event["loss"]))
        for event in read_events(Path(replay.folder) / EVENTS)
        if event["event"] == "step" and steps[0] - _CONTEXT_STEPS <= event["step"] <= steps[-1] + _CONTEXT_STEPS
    ]
    series = {"the run's log": logged, "replay": [(step.step, step.loss) for step in replay.steps]}
    finite = {name: [point for point in points if math.isfinite(point[1])] for name, points in series.items()}
    if all(finite.values()) and max(map(len, finite.values())) > 1:
        yield charts.make_line_chart("Loss", "step", "loss", finite, from_zero=False)
