"""The training loop: a generator of events that doesn't depend on the strategy, the launcher or files."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from lockstep.core.engine_recipe import EngineRecipe
from lockstep.core.order import Step
from lockstep.parallel.engine import StepEngine
from lockstep.ranks.signals import STOP_LEVELS
from lockstep.tasks.base import MicroBatches
from lockstep.training.events import Evaluated, Event, Saved, Stopped
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReporter
from lockstep.training.turn import TrainingStep


class StopSource(Protocol):
    """The source of stop requests. `level` is 0 if no stop is requested, or else one of those in ranks/signals.py."""

    @property
    def level(self) -> int: ...


Batches = Callable[[int], Iterable[tuple[Step, MicroBatches]]]


def run_training_step(
    engine: StepEngine, recipe: EngineRecipe, training_step: TrainingStep, lr: float, *, observe: bool = False
) -> None:
    """Run one step of an engine at learning rate `lr`. All ranks call it."""
    sums = engine.forward_backward(training_step.microbatches, training_step.step, observe)
    training_step.record_digest()
    training_step.record_update(lr, sums, engine.update(lr, recipe.clip_norm))


def train(engine: StepEngine, reports: StepReporter, items: Iterable[TrainingStep | Event]) -> Iterator[Event]:
    """Run each step in `items` on an engine, at the learning rate of the plan, and yield the events in `items`."""
    plan = reports.plan
    assert plan.rate is not None
    assert plan.recipe is not None
    for item in items:
        if isinstance(item, TrainingStep):
            observe = plan.compute_metrics is not None and plan.should_report(item.step)
            run_training_step(
                engine, plan.recipe, item, plan.rate.compute_rate(item.step.samples_seen), observe=observe
            )
        else:
            yield item


def iterate_training_steps(
    batches: Batches,
    reports: StepReporter,
    *,
    save: Callable[[Progress], Iterable[Saved]],
    evaluate: Callable[[Progress], Evaluated] | None = None,
    stop: StopSource | None = None,
    is_preempted: Callable[[], bool] | None = None,
) -> Iterator[TrainingStep | Event]:
    """Yield the remaining steps of the plan and the events after each step, until the plan ends or the ranks stop.

    All ranks must iterate over it, and all ranks get the same steps. `batches(first)` returns the steps starting at
    number `first`, with the micro-batches of this rank. For each step:

    1. The step is yielded. The caller must run the step before it requests the next item.

    2. The ranks agree on the stop level. A stop request takes effect after the next step. Without `stop`, this rank
    never requests a stop.

    3. The report of the step is yielded, if it is due.

    4. If an evaluation is due, `evaluate` runs it, and its event is yielded. Without `evaluate`, there are no
    evaluations.

    5. If a save is due, `save` starts it, collects the digests, and returns the saves that have completed. A save is
    also due if the run ends or stops, or if `is_preempted` returns True at a reported step. All ranks call `save`.

    6. If the ranks agreed to stop before the plan ends, Stopped is yielded, and the generator returns.

    A non-finite loss raises TrainingError, at the latest with the next report.
    """
    plan, progress, world = reports.plan, reports.progress, reports.world
    for step, microbatches in reports.time_waits(batches(progress.step)):
        training_step = TrainingStep(step, microbatches, progress, reports.digests)
        yield training_step
        # This must be the first collective after the step. Otherwise, it could be paired with a different collective
        # that a custom training loop issues on another rank.
        level = world.agree_on_stop_level(stop.level if stop else 0)
        yield from reports.report(training_step)
        is_last = progress.step == plan.steps.total
        if evaluate is not None and plan.evaluate is not None and (is_last or plan.evaluate.falls_on(step)):
            with reports.paused():
                evaluated = evaluate(progress)
                progress.record_evaluation(evaluated, plan.monitor)
                yield evaluated
        at_risk = is_preempted is not None and plan.should_report(step) and is_preempted()
        if is_last or level or at_risk or plan.save.falls_on(step):
            with reports.paused():
                yield from save(progress)
        if level and not is_last:
            yield Stopped(**progress.event_fields, reason=STOP_LEVELS[level])
            return
