"""The findings of a replay, as lines for a terminal and as sections of a page."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lockstep.replay.run import Replay, ReplayedStep
from lockstep.reporting import charts
from lockstep.reporting.jsonl import EVENTS, read
from lockstep.reporting.page import Section, Table, Words
from lockstep.training.observer import BATCH, LOSS, Examined, NonFinite

_SHOWN: Final = 3  # samples and layers, in a terminal
_MOST: Final = 200  # the most rows of a table
_AROUND: Final = 50  # steps before and after the replay to draw


def lines(replay: Replay) -> Iterator[str]:
    """Yield the lines for a terminal."""
    steps = [each.step for each in replay.steps]
    began = f"after step {replay.start}" if replay.start else "from the first weights"
    placed = f"{replay.strategy} on {replay.processes} process{'es' if replay.processes > 1 else ''}"
    yield f"{replay.folder}  {_span(steps)}  begun {began}  {placed}"
    yield from _verdict(replay)
    if replay.ended:
        yield "loss      not known: the script ended before the step was done"
    else:
        yield f"loss      {replay.steps[-1].loss:.6g} at step {steps[-1]}, learning rate {replay.steps[-1].lr:.6g}"
    found = replay.examined
    if found is not None and found.losses:
        listed = ", ".join(f"{replay.name_of(number)} {loss:.4g}" for number, _, loss in _samples(replay)[:_SHOWN])
        yield f"samples   {len(found.losses)}; of the largest loss {listed}"
    if found is not None and found.microbatches:
        listed = ", ".join(f"micro-batch {index} {loss:.4g}" for index, loss in _microbatches(found)[:_SHOWN])
        yield f"samples   {sum(map(len, replay.samples))}; of the largest loss {listed}"
    if replay.layers:
        largest = sorted(replay.layers, key=lambda each: _order(each.gradient))[:_SHOWN]
        yield f"gradients largest in {', '.join(f'{each.name} {each.gradient:.3g}' for each in largest)}"
    if found is not None and found.nonfinite is not None:
        yield f"first {_where(replay, found.nonfinite)}"
    broken = [each.name for each in replay.layers if not math.isfinite(each.weight)]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        yield f"weights   {broken[0]}{more} not finite before the step already; replay an earlier one"


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return "no step done"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _verdict(replay: Replay) -> Iterator[str]:
    known = [each for each in replay.steps if each.recorded is not None]
    different = replay.different
    if replay.same_start is False:
        yield f"weights   after step {replay.start} are not those whose digest the run has"
    if different is not None:
        before = max((each.step for each in known if each.step < different.step), default=None)
        since = "" if before is None else f"; step {before} is still the same"
        yield f"digests   step {different.step} is another one than the run's{since}"
        yield from (f"          {each}" for each in replay.differences)
    elif known:
        yield f"digests   {len(known)} of {len(known)} are the run's: the same bits"
    else:
        yield "digests   none to compare: the run has none of these steps, or its recipe was changed"


def _order(value: float) -> float:
    """Return a sort key that puts the largest value first, and NaN among the infinite values."""
    return -math.inf if math.isnan(value) else -value


def _samples(replay: Replay) -> list[tuple[int, int, float]]:
    """Return the index, micro-batch and loss of each sample, with the largest loss first."""
    assert replay.examined is not None
    rows = [
        (replay.samples[each.microbatch][each.place], each.microbatch, each.loss) for each in replay.examined.losses
    ]
    return sorted(rows, key=lambda row: _order(row[2]))


def _microbatches(found: Examined) -> list[tuple[int, float]]:
    """Return the index and loss of each micro-batch, with the largest loss first."""
    return sorted(found.microbatches.items(), key=lambda row: _order(row[1]))


def _where(replay: Replay, found: NonFinite) -> str:
    sample = f", {replay.name_of(replay.samples[found.microbatch][found.place])}" if found.place >= 0 else ""
    place = f"micro-batch {found.microbatch}{sample}"
    if found.module == BATCH:
        return f"{found.what} in the batch, as the dataset gives it, {place}"
    module = found.module if found.module == LOSS else f"module {found.module}"
    return f"{found.what} in the {found.phase} of {module}, by {found.operation}, {place}"


def sections(replay: Replay) -> Iterator[Section]:
    """Yield the sections of a page."""
    yield Words("", [*lines(replay)])
    yield from _curve(replay)
    if len(replay.steps) > 1 or replay.examined is None:
        rows = [
            [str(each.step), f"{each.loss:.6g}", f"{each.lr:.6g}", f"{each.digest:016x}", _match(each)]
            for each in replay.steps[-_MOST:]
        ]
        yield Table("Steps", ("step", "loss", "learning rate", "digest", "the run's"), rows)
    found = replay.examined
    if found is not None:
        yield from _examined(replay, found)
    if replay.layers:
        rows = [
            [each.name, f"{each.weight:.4g}", f"{each.gradient:.4g}", f"{each.update:.4g}"]
            for each in sorted(replay.layers, key=lambda each: _order(each.gradient))[:_MOST]
        ]
        note = "L2 norms; the gradient is divided by the weight of the step, and not clipped."
        yield Table("Parameters", ("name", "before the step", "gradient", "update"), rows, note)


def _match(step: ReplayedStep) -> str:
    return "not known" if step.recorded is None else "another" if step.differs else "the same"


def _examined(replay: Replay, found: Examined) -> Iterator[Section]:
    note = "Those of the largest loss come first."
    if found.microbatches:
        names = [", ".join(map(replay.name_of, numbers)) for numbers in replay.samples]
        rows = [[str(index), f"{loss:.6g}", names[index]] for index, loss in _microbatches(found)[:_MOST]]
        yield Table("Micro-batches", ("micro-batch", "loss", "samples"), rows, note)
    if found.losses:
        rows = [[replay.name_of(number), str(index), f"{loss:.6g}"] for number, index, loss in _samples(replay)[:_MOST]]
        yield Table("Samples", ("sample", "micro-batch", "loss"), rows, note)
    largest = sorted(found.activations.items(), key=lambda each: _order(each[1]))[:_MOST]
    rows = [[name, f"{value:.4g}"] for name, value in largest]
    yield Table("Activations", ("module", "largest absolute value"), rows)


def _curve(replay: Replay) -> Iterator[Section]:
    """Yield a chart of the replayed losses and the losses that the run logged around them."""
    steps = [each.step for each in replay.steps]
    if not steps:
        return
    logged = [
        (event["step"], float(event["loss"]))
        for event in read(Path(replay.folder) / EVENTS)
        if event["event"] == "step" and steps[0] - _AROUND <= event["step"] <= steps[-1] + _AROUND
    ]
    series = {"the run's log": logged, "replay": [(each.step, each.loss) for each in replay.steps]}
    finite = {name: [point for point in points if math.isfinite(point[1])] for name, points in series.items()}
    if all(finite.values()) and max(map(len, finite.values())) > 1:
        yield charts.lines("Loss", "step", "loss", finite, from_zero=False)
