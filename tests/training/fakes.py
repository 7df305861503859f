"""An engine whose losses are chosen beforehand, and what else the loop needs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.order import Step, Steps
from lockstep.core.rate import RateSchedule
from lockstep.parallel.engine import PredictFunction, State, Sums, Update
from lockstep.tasks.base import MicroBatch
from lockstep.training.events import Evaluated, Event, Saved
from lockstep.training.plan import Plan
from lockstep.training.progress import Progress


@dataclass
class FakeEngine:
    """Notes what it is asked; `losses` by step number, 1.0 where not told; `skipped` are steps not applied."""

    losses: dict[int, float] = field(default_factory=dict)
    local_losses: dict[int, list[float]] = field(default_factory=dict)
    skipped: frozenset[int] = frozenset()
    calls: list[tuple[object, ...]] = field(default_factory=list)
    _number: int = 0

    def forward_backward(self, microbatches: Sequence[MicroBatch], step: Step, observe: bool = False) -> Sums:
        self._number = step.number
        self.calls.append(("forward_backward", step.number, [each.index for each in microbatches]))
        loss = self.losses.get(step.number, 1.0)
        own = self.local_losses.get(step.number, [loss])
        total = torch.tensor(loss, dtype=torch.float64) * step.samples
        return Sums(total, step.samples, [torch.tensor(each) for each in own])

    def update(self, lr: float, max_norm: float | None) -> Update:
        self.calls.append(("update", lr, max_norm))
        norm = None if max_norm is None else torch.tensor(3.0)
        return Update(norm, self._number not in self.skipped, 8.0 if self.skipped else None)

    @contextmanager
    def evaluation(self) -> Iterator[PredictFunction]:
        self.calls.append(("evaluation",))
        yield lambda inputs: inputs[0]

    def state(self) -> State:
        raise NotImplementedError

    def load(self, state: State) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.calls.append(("close",))


def batches(
    steps: Steps, upto: Callable[[Step], None] = lambda _: None
) -> Callable[[int], Iterator[tuple[Step, list[MicroBatch]]]]:
    """Return the steps with one empty micro-batch each; `upto` is called before each."""

    def from_step(first: int) -> Iterator[tuple[Step, list[MicroBatch]]]:
        for number in range(first, steps.total):
            upto(steps[number])
            yield steps[number], [MicroBatch(0, torch.empty(1), 1, 1)]

    return from_step


def plan(steps: Steps, clip_norm: float | None = None, **changes: object) -> Plan:
    rate = RateSchedule(base=0.5, samples_per_epoch=steps.samples_per_epoch, epochs=4.0, curve="linear")
    return Plan(steps, rate, recipe=PlainRecipe(1, clip_norm=clip_norm), **changes)  # type: ignore[arg-type]


def evaluated(top1: float = 0.5, loss: float = 1.0) -> Callable[[Progress], Evaluated]:
    return lambda progress: Evaluated(
        step=progress.step,
        epoch=progress.epoch,
        samples=progress.samples,
        loss=loss,
        figures={"top1": top1},
        evaluated=100,
        of=100,
        seconds=0.0,
    )


def saved(progress: Progress) -> list[Saved]:
    event = Saved(
        step=progress.step,
        epoch=progress.epoch,
        samples=progress.samples,
        path=f"step-{progress.step}",
        weights_sha256="",
        best=progress.best_at == progress.step,
        seconds=0.0,
    )
    return [event]


def shortly(events: Sequence[Event]) -> list[str]:
    return [f"{event.name} {event.step}" for event in events]
