"""The training loop: a generator of events that knows no strategy, no launcher and no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from lockstep.core.order import Step, Steps
from lockstep.core.rate import Rate
from lockstep.parallel.engine import Stepping, Update
from lockstep.runtime.meter import Meter
from lockstep.runtime.signals import WISHES
from lockstep.runtime.world import World
from lockstep.tasks.base import MicroBatch
from lockstep.training.events import Evaluated, Event, Saved, Stepped, Stopped
from lockstep.training.watch import LossWatch


@dataclass(frozen=True, slots=True)
class Every:
    """A rhythm: every so many steps, or at the end of every so many epochs."""

    steps: int | None = None
    epochs: int | None = None

    def falls_on(self, step: Step) -> bool:
        """Whether something is due once `step` is done."""
        if self.steps is not None:
            return (step.number + 1) % self.steps == 0
        return step.last_of_epoch and self.epochs is not None and (step.epoch + 1) % self.epochs == 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the loop follows: the steps, the rate, and the rhythms of reporting, evaluating and saving."""

    steps: Steps
    rate: Rate
    clip_norm: float | None = None
    stop_on_nonfinite: bool = True
    log: Every = Every(steps=10)
    evaluate: Every = Every(epochs=1)
    save: Every = Every(epochs=1)


@dataclass
class Progress:
    """How far a run has come: what its checkpoint keeps beside the engine's state."""

    step: int = 0  # updates done
    epoch: int = 0
    samples: int = 0  # seen
    skipped_steps: int = 0
    top: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: dict[str, float] = field(default_factory=dict)  # of the best one
    best_loss: float = math.inf
    best_at: int = -1  # the step it was made after

    def advance(self, step: Step, applied: bool) -> None:
        """Count `step` as done."""
        self.step = step.number + 1
        self.epoch = step.epoch
        self.samples = step.samples_seen + step.samples
        self.skipped_steps += not applied

    def kept(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return asdict(self)

    def judge(self, evaluated: Evaluated) -> None:
        """Note an evaluation, and whether it is the best so far: by its first top-k, then by its loss."""
        self.top = evaluated.top
        if (_first(evaluated.top), -evaluated.loss) > (_first(self.best), -self.best_loss):
            self.best, self.best_loss, self.best_at = evaluated.top, evaluated.loss, self.step


class Stop(Protocol):
    """What asks to stop: `wish` is 0, or a number of runtime/signals.py."""

    @property
    def wish(self) -> int: ...


Batches = Callable[[int], Iterable[tuple[Step, Sequence[MicroBatch]]]]


def train(
    engine: Stepping,
    world: World,
    batches: Batches,
    plan: Plan,
    progress: Progress,
    evaluate: Callable[[Progress], Evaluated],
    save: Callable[[Progress], Iterable[Saved]],
    stop: Stop,
) -> Iterator[Event]:
    """Train from `progress` to the end of the plan, or to the step boundary at which the ranks agree to stop.

    `batches(first)` gives each step from number `first` on with this rank's micro-batches. All ranks iterate, each gets
    the same events, and whoever iterates says in the end what was done. `save` gives the saves that are done by then. A
    loss that is not finite raises TrainingError, at the latest with the next report.
    """
    watch, meter = LossWatch(world, plan.stop_on_nonfinite), Meter(world.device)
    for step, microbatches in batches(progress.step):
        lr = plan.rate.at(step.samples_seen)
        sums = engine.forward_backward(microbatches, step)
        update = engine.update(lr, plan.clip_norm)
        progress.advance(step, update.applied)
        watch.add(step, lr, sums)
        meter.add(step.samples)
        last = progress.step == plan.steps.total
        if last or plan.log.falls_on(step):
            yield _stepped(progress, lr, watch.check(), update, meter)
        if last or plan.evaluate.falls_on(step):
            watch.check()
            evaluated = evaluate(progress)
            progress.judge(evaluated)
            yield evaluated
            meter.restart()
        wish = world.agree_to_stop(stop.wish)
        if last or wish or plan.save.falls_on(step):
            watch.check()
            yield from save(progress)
            meter.restart()
        if wish and not last:
            yield Stopped(step=progress.step, epoch=progress.epoch, samples=progress.samples, reason=WISHES[wish])
            return


def _stepped(progress: Progress, lr: float, loss: float, update: Update, meter: Meter) -> Stepped:
    return Stepped(
        step=progress.step,
        epoch=progress.epoch,
        samples=progress.samples,
        loss=loss,
        lr=lr,
        norm=None if update.norm is None else float(update.norm),
        loss_scale=update.loss_scale,
        skipped_steps=progress.skipped_steps,
        images_per_s=meter.read(),
        peak_bytes=meter.peak_bytes(),
    )


def _first(top: dict[str, float]) -> float:
    return next(iter(top.values()), 0.0)
