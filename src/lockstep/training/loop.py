"""The training loop: a generator of events that knows no strategy, no launcher and no file."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from lockstep.comm.world import World
from lockstep.core.engine_recipe import against_nonfinite
from lockstep.core.order import Step
from lockstep.device.meter import Meter
from lockstep.parallel.engine import Stepping, Sums, Update
from lockstep.ranks.signals import STOP_LEVELS
from lockstep.tasks.base import LOSS, MicroBatches
from lockstep.training.digests import StepDigests
from lockstep.training.events import Evaluated, Event, Saved, Stepped, Stopped
from lockstep.training.plan import Plan
from lockstep.training.progress import Progress
from lockstep.training.watch import NonFiniteCheck


class Stop(Protocol):
    """What asks to stop: `level` is 0, or a number of ranks/signals.py."""

    @property
    def level(self) -> int: ...


Batches = Callable[[int], Iterable[tuple[Step, MicroBatches]]]


@dataclass(slots=True, eq=False)
class Turn:
    """A step that is to be done now, with this rank's micro-batches, by the caller that iterates over `turns`."""

    step: Step
    microbatches: MicroBatches
    progress: Progress
    of: "Callable[[Turn], Sequence[Stepped]]"  # what is reported of a step that is done
    check: Callable[[], object]  # raises TrainingError if the loss of a step so far is not finite; all ranks call it
    digests: StepDigests | None = None
    lr: float = math.nan
    sums: Sums | None = None  # None: it is not done
    update: Update | None = None
    reported: bool = False  # whether its figures are wanted
    counted: bool = False

    def digest(self) -> None:
        """Note the digest of the step's gradient, which is there now; all ranks call it before they update."""
        if self.digests is not None:
            self.digests.add(self.step.number + 1)

    def done(self, lr: float, sums: Sums, update: Update) -> None:
        """Count the step as done, at this learning rate, and note its results."""
        self.lr, self.sums, self.update = lr, sums, update
        self.progress.advance(self.step, update.applied)

    def again(self, sums: Sums, update: Update) -> None:
        """Note the results of a further update of a step that is counted: a loss that is not finite stays seen."""
        assert self.sums is not None
        assert self.update is not None
        before = self.sums.total
        self.progress.skipped_steps += self.update.applied and not update.applied
        self.sums = sums._replace(total=torch.where(before.isfinite(), sums.total, before))
        self.update = update._replace(applied=self.update.applied and update.applied)

    def report(self) -> Sequence[Stepped]:
        """Return what is reported of the step, once it is done; a second call returns nothing. All ranks call it."""
        counted, self.counted = self.counted, True
        return () if counted else self.of(self)


def train(engine: Stepping, plan: Plan, following: Iterable[Turn | Event]) -> Iterator[Event]:
    """Let an engine do the steps of `turns` of the plan, at its learning rate; yield the events."""
    assert plan.rate is not None
    assert plan.recipe is not None
    for each in following:
        if not isinstance(each, Turn):
            yield each
            continue
        lr = plan.rate.at(each.step.samples_seen)
        observe = each.reported and plan.figures is not None
        sums = engine.forward_backward(each.microbatches, each.step, observe)
        each.digest()
        each.done(lr, sums, engine.update(lr, plan.recipe.clip_norm))


def turns(
    world: World,
    batches: Batches,
    plan: Plan,
    progress: Progress,
    *,
    save: Callable[[Progress], Iterable[Saved]],
    evaluate: Callable[[Progress], Evaluated] | None = None,
    stop: Stop | None = None,
    digests: StepDigests | None = None,
    preempted: Callable[[], bool] | None = None,
) -> Iterator[Turn | Event]:
    """Yield the steps from `progress` to the end of the plan, or to the boundary at which the ranks agree to stop.

    `batches(first)` gives each step from number `first` on with this rank's micro-batches. All ranks iterate, each gets
    the same; the caller does the steps, and reports in the end what was done. `save` gives the saves that are
    done by then, and collects the `digests`. Without `evaluate` nothing is evaluated, and without `stop` nobody asks to
    stop. Steps that are reported are saved while ranks are to be `preempted`, which all of them are asked. A loss that
    is not finite raises TrainingError, at the latest with the next report.
    """
    advice = against_nonfinite(plan.recipe)
    watch = NonFiniteCheck(world, plan.stop_on_nonfinite, advice, digests)
    meter = Meter(world.device)
    for step, microbatches in batches(progress.step):
        report = partial(_report, plan, watch, meter)
        turn = Turn(step, microbatches, progress, report, watch.check, digests, reported=plan.reports(step))
        yield turn
        # First: a loop of the user's own may have one rank do something else now, which meets this exchange.
        level = world.agree_to_stop(stop.level if stop else 0)
        yield from turn.report()
        last = progress.step == plan.steps.total
        if evaluate is not None and plan.evaluate is not None and (last or plan.evaluate.falls_on(step)):
            watch.check()
            evaluated = evaluate(progress)
            progress.judge(evaluated, plan.monitor)
            yield evaluated
            meter.restart()
        at_risk = preempted is not None and plan.reports(step) and preempted()
        if last or level or at_risk or plan.save.falls_on(step):
            watch.check()
            yield from save(progress)
            meter.restart()
        if level and not last:
            yield Stopped(**progress.at, reason=STOP_LEVELS[level])
            return


def _report(plan: Plan, watch: NonFiniteCheck, meter: Meter, turn: Turn) -> Sequence[Stepped]:
    """Count a step that is done, and return what is reported of it, if its figures are wanted."""
    assert turn.sums is not None
    assert turn.update is not None
    watch.add(turn.step, turn.lr, turn.sums)
    meter.add(turn.step.samples, turn.sums.weight)
    if not turn.reported:
        return ()
    if turn.digests is not None:
        turn.digests.collect(waits=True)
    stepped = _step_event(plan, turn.progress, turn.lr, watch.check(), turn.update, meter)
    return [replace(stepped, figures=_figures(plan, turn.step, turn.sums))]


def _figures(plan: Plan, step: Step, sums: Sums) -> dict[str, float]:
    """Return the task's figures of a step, as the model was before it; its loss is reported with them."""
    if plan.figures is None:
        return {}
    counts = {"weight": torch.tensor(sums.weight), "samples": torch.tensor(step.samples)}
    figures = plan.figures({"loss": sums.total.double().cpu(), **counts, **sums.of_task})
    return {name: figure for name, figure in figures.items() if name != LOSS.name}


def _step_event(plan: Plan, progress: Progress, lr: float, loss: float, update: Update, meter: Meter) -> Stepped:
    samples_per_s, weight_per_s = meter.read()
    return Stepped(
        **progress.at,
        loss=loss,
        lr=lr,
        norm=None if update.norm is None else float(update.norm),
        loss_scale=update.loss_scale,
        skipped_steps=progress.skipped_steps,
        samples_per_s=samples_per_s,
        weight_per_s=weight_per_s if plan.weighs else None,
        peak_bytes=meter.peak_bytes(),
    )
