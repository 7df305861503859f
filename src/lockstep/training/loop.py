"""The training loop: a generator of events that knows no strategy, no launcher and no file."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from lockstep.core.engine_recipe import EngineRecipe
from lockstep.core.order import Step
from lockstep.parallel.engine import Stepping
from lockstep.ranks.signals import STOP_LEVELS
from lockstep.tasks.base import MicroBatches
from lockstep.training.events import Evaluated, Event, Saved, Stopped
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReports
from lockstep.training.turn import Turn


class Stop(Protocol):
    """What asks to stop: `level` is 0, or a number of ranks/signals.py."""

    @property
    def level(self) -> int: ...


Batches = Callable[[int], Iterable[tuple[Step, MicroBatches]]]


def take_step(engine: Stepping, recipe: EngineRecipe, turn: Turn, lr: float, *, observe: bool = False) -> None:
    """Let an engine do a step at a learning rate. All ranks call it."""
    sums = engine.forward_backward(turn.microbatches, turn.step, observe)
    turn.digest()
    turn.done(lr, sums, engine.update(lr, recipe.clip_norm))


def train(engine: Stepping, reports: StepReports, following: Iterable[Turn | Event]) -> Iterator[Event]:
    """Let an engine do the steps of `turns`, at the learning rate of their plan; yield the events."""
    plan = reports.plan
    assert plan.rate is not None
    assert plan.recipe is not None
    for turn in following:
        if isinstance(turn, Turn):
            observe = plan.figures is not None and plan.reports(turn.step)
            take_step(engine, plan.recipe, turn, plan.rate.at(turn.step.samples_seen), observe=observe)
        else:
            yield turn


def turns(
    batches: Batches,
    reports: StepReports,
    *,
    save: Callable[[Progress], Iterable[Saved]],
    evaluate: Callable[[Progress], Evaluated] | None = None,
    stop: Stop | None = None,
    preempted: Callable[[], bool] | None = None,
) -> Iterator[Turn | Event]:
    """Yield the steps from the reports' progress to the end of their plan, or to where the ranks agree to stop.

    `batches(first)` gives each step from number `first` on with this rank's micro-batches. All ranks iterate and get
    the same steps; the caller does each before it asks for the next. `save` yields the saves that are done by then, and
    collects the digests. Without `evaluate` nothing is evaluated, and without `stop` nobody asks to stop. Steps that
    are reported are saved while ranks are to be `preempted`, which all of them are asked. A loss that is not finite
    raises TrainingError, at the latest with the next report.
    """
    plan, progress, world = reports.plan, reports.progress, reports.world
    for step, microbatches in batches(progress.step):
        turn = Turn(step, microbatches, progress, reports.digests)
        yield turn
        # First: a loop of the user's own may have one rank do something else now, which meets this exchange.
        level = world.agree_to_stop(stop.level if stop else 0)
        yield from reports.report(turn)
        last = progress.step == plan.steps.total
        if evaluate is not None and plan.evaluate is not None and (last or plan.evaluate.falls_on(step)):
            with reports.paused():
                evaluated = evaluate(progress)
                progress.judge(evaluated, plan.monitor)
                yield evaluated
        at_risk = preempted is not None and plan.reports(step) and preempted()
        if last or level or at_risk or plan.save.falls_on(step):
            with reports.paused():
                yield from save(progress)
        if level and not last:
            yield Stopped(**progress.at, reason=STOP_LEVELS[level])
            return
