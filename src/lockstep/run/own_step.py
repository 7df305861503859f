"""A step of a loop of the user's own: its micro-batches, their backwards and the update, and what must not be done.

A step that is audited (parallel/audited.py) gives the loop further micro-batches, which count for nothing: first the
one that this rank repeats, and where the ranks do not agree some to find out who is wrong. So it is finished when the
loop over micro-batches ends, and not by the update.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import final

from torch import Tensor

from lockstep.comm.world import World
from lockstep.common.own_code import calling, refusal
from lockstep.core import random
from lockstep.core.batch import Batch
from lockstep.data.items import seed_python_and_numpy
from lockstep.parallel.audited import Part
from lockstep.run.own_loss import LossCheck
from lockstep.run.own_model import Gate, StrayModuleCheck
from lockstep.run.own_placed import Placed
from lockstep.tasks.base import MicroBatch
from lockstep.training.loop import Interval, Turn

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours


# Places of a step that generators are seeded for.
_HEAD, _AFTER_MICROBATCHES, _MICROBATCH, AFTER_LOOP = range(4)


def seed_all(world: World, key: int) -> None:
    """Seed what a loop draws from: Python's and NumPy's generators, torch's and that of the device."""
    seed_python_and_numpy(key)
    world.seed(key)


@final
@dataclass(eq=False, repr=False)
class Step:
    """One step of `run.steps`: iterate over its micro-batches, give `backward` each one's loss, and `update` once.

    Or once for each of some groups of the optimizer, `update(of=...)`, with an iteration before each.
    """

    _turn: Turn
    _gate: Gate
    _leaves: int
    _placed: Placed
    _make_stray_check: Callable[[int], StrayModuleCheck | None]
    _losses: Callable[[int], LossCheck]
    _audit: Callable[[], Iterator[Part]] | None

    def __post_init__(self) -> None:
        self._engine, self._guard = self._placed.engine, self._placed.guard
        self._part = Part(self._turn.microbatches)
        own = self._turn.microbatches[self._audit is not None :]
        self._counts = partial(_counts, self._turn, own, self._leaves)
        self._current: MicroBatch | None = None
        self._forward: AbstractContextManager[None] | None = None
        self._stray_check: StrayModuleCheck | None = None
        self._begun = self._duplicate = self._updated = self._saved = False
        self._done = 0  # backwards
        self._phase = 0  # iterations over the micro-batches that ended with an update
        self._where = ""  # the line of the loop over micro-batches, once it was left too early
        self._draws = random.key(random.OWN_LOOP, self._placed.settings.seed, self._turn.step.number)
        self._seed_between(_HEAD)

    @property
    def number(self) -> int:
        """The number of this step, from 1."""
        return self._turn.step.number + 1

    @property
    def epoch(self) -> int:
        """The number of this epoch, from 0."""
        return self._turn.step.epoch

    @property
    def samples(self) -> int:
        """The samples of this step, over all ranks."""
        return self._turn.step.samples

    @property
    def samples_seen(self) -> int:
        """The samples of all steps before this one, over all ranks: what a learning rate is a function of."""
        return self._turn.step.samples_seen

    @property
    def weight(self) -> int:
        """What the step's loss is divided by, over all ranks: its samples, or what `weight` of `run.steps` counts."""
        return self._turn.step.weight

    @property
    def updated(self) -> bool:
        """Whether `update` is done: after each iteration over the micro-batches anew."""
        return self._updated

    @property
    def loss(self) -> Tensor:
        """The loss of the whole step by its weight, 0-dim and float64, the same on every rank; after `update`."""
        if self._turn.sums is None:
            raise refusal(f"step {self.number}: step.loss is known after step.update", "ask for it then")
        return self._turn.sums.loss

    @property
    def norm(self) -> Tensor | None:
        """The L2 norm of the step's gradient before it was clipped; None without `clip`, and before `update`."""
        return None if self._turn.update is None else self._turn.update.norm

    @property
    def duplicate(self) -> bool:
        """Whether the micro-batch at hand counts on another rank: leave it out of what the loop itself adds up.

        So it is where ranks gather weights together and have not equally many, and where an audit repeats it.
        """
        return self._duplicate

    def every(self, *, epochs: int | None = None, steps: int | None = None) -> bool:
        """Return whether this step ends a period of so many `epochs`, or of so many `steps`."""
        if (epochs is None) == (steps is None):
            raise refusal("step.every: give either epochs or steps", "give one of the two")
        return Interval(steps, epochs).falls_on(self._turn.step)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches, on its device, as the dataset's items collate: `for x, y in step`.

        From each up to its `backward`, the random numbers are its own, and the precision is that of the run. Ranks may
        have different numbers of them. A step that is left before the last one raises UsageError.
        """
        if self._begun:
            raise refusal(f"step {self.number}: its micro-batches are gone through a second time", "do it once")
        if self._saved:
            raise refusal(
                f"step {self.number}: its micro-batches are gone through again after run.save",
                "save after the last update of a step: a resumed run begins with the next step",
            )
        self._begun, self._updated = True, False
        self._gate.step = self._guard.step = self.number
        try:
            for microbatch in self._microbatches():
                if self._done:
                    self._guard.check(whole=False, modes=True)
                self._stray_check = None if self._done else self._make_stray_check(self._phase)
                self._current = microbatch
                self._duplicate = microbatch.dummy
                seed_python_and_numpy(
                    random.extend_key(self._draws, _MICROBATCH, microbatch.index)
                )  # torch's the engine seeds
                forward = self._engine.forward_beside if self._part.beside else self._engine.forward
                self._forward = forward(microbatch, self._turn.step)
                self._forward.__enter__()
                self._gate.open = True
                if not self._done:
                    self._placed.modes.check(self.number)
                self._guard.mark(modes=not self._done)
                yield microbatch.batch
                if self._current is not None:
                    raise refusal(
                        f"step {self.number}: no backward for micro-batch {self._done + 1} of {self._of}",
                        "call step.backward(loss), not loss.backward(), for each",
                    )
        finally:
            if self._complete:
                # Here, and not after the update: numbers drawn before the update may be for the next step, too.
                self._seed_between(_AFTER_MICROBATCHES)
            else:
                self._where = calling()
                self._leave(early=True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch to that of the step; called once for each.

        `loss` is 0-dim: the sum over the micro-batch, not its mean, which raises UsageError.
        """
        microbatch = self._current
        if microbatch is None:
            what = f"a second backward: {self._gate.ended}" if self._done else "a backward outside of a micro-batch"
            raise refusal(
                f"step {self.number}: {what}",
                "call step.backward once for each, within `for batch in step`, with the sum of its losses",
            )
        self._losses(self._phase).check(self.number, loss, microbatch, self._counts, self._gate.returned)
        if self._stray_check is not None:
            self._stray_check.check_leaves(self.number, loss)
        self._leave()
        self._guard.check(whole=False, modes=True, forward=True)
        self._gate.end_batch()
        self._guard.give_back()
        self._current = None
        self._done += 1
        self._gate.recomputing = True
        try:
            if self._part.beside:
                self._engine.backward_beside(microbatch, loss, self._turn.step)
            else:
                self._engine.backward(microbatch, loss)
        finally:
            self._gate.recomputing = False
        self._guard.withhold()
        self._guard.mark()
        self._gate.ended_at = self._guard.last

    def update(self, lr: float | None = None, clip: float | None = None, *, of: str | None = None) -> None:
        """Divide the gradient by the step's weight, clip its L2 norm to `clip`, and update the weights at rate `lr`.

        Left out, `lr` is the rate that the scheduler has set, if `run.place` was given one, else that which the
        optimizer was made with, and nothing is clipped. Groups keep the ratio of their rates. Every rank calls it, once
        for each step and with the same arguments.
        """
        if self.updated:
            raise refusal(
                f"step {self.number}: a second step.update",
                "call it once for each step, or with of= after another iteration over its micro-batches",
            )
        if not self._complete:
            raise self._unfinished()
        self._guard.check()
        self._guard.give_back()
        scheduler = self._placed.scheduler
        if scheduler is not None and lr is not None:
            raise refusal(f"step {self.number}: a rate besides that of the scheduler", "give one of the two")
        rate = self._placed.rate if lr is None else self._setting("lr", lr)
        shown, rate = (rate, rate) if scheduler is None else (scheduler.rate, 1.0)  # of which each group takes its own
        only = None if of is None else self._groups_of(of)
        clip = None if clip is None else self._setting("clip", clip)
        self._placed.agree(self.number, rate, clip, of)
        self._gate.step = self._guard.step = 0
        sums = self._part.sums or self._engine.end()
        if self._turn.sums is None:
            self._turn.digest()
            self._turn.done(shown, sums, self._engine.update(rate, clip, only))
        else:  # the step is counted; its loss and norm are those of its last update
            self._turn.again(sums, self._engine.update(rate, clip, only))
        self._updated = True
        if only is not None:
            self._phase += 1
            self._begun, self._done, self._part = False, 0, Part(self._turn.microbatches)
        if scheduler is not None:
            scheduler.note_update()
        self._placed.audit.kept.note(self._turn.step)
        self._guard.mark(moved=True)

    def _setting(self, name: str, value: float) -> float:
        """Return `lr` or `clip` as a float; UsageError if the weights would not move by it, or would go uphill."""
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # of a tensor with several values
            number = math.nan
        if name == "clip" and not number > 0:
            raise refusal(f"step {self.number}: clip is {value!r}", "give a norm above 0, or leave it out")
        if name == "lr" and not 0 <= number < math.inf:
            raise refusal(f"step {self.number}: lr is {value!r}", "give a finite rate from 0")
        return number

    def _groups_of(self, of: str) -> frozenset[int]:
        """Return the numbers of the groups to update."""
        reasons = {
            "in a step that is audited": self._audit is not None,
            "while the weights are averaged (ema)": self._placed.numerics.ema_decay is not None,
            "where gradients are compressed, which keeps a part of those of other groups": self._engine.compresses,
        }
        if what := next((reason for reason, holds in reasons.items() if holds), ""):
            raise refusal(f"step {self.number}: an update of some groups {what}", "leave one of the two out")
        return self._placed.groups.named(of)

    def _unfinished(self) -> Exception:
        """Return the error for a step that was left before its update."""
        if not self._complete:
            return refusal(
                f"step {self.number}: left after {self._done} of its {self._of} micro-batches",
                "let `for batch in step` run to its end, with a step.backward for each: other ranks wait for them",
                self._where,
            )
        return refusal(f"step {self.number}: left without step.update", "call step.update once for each step")

    def _leave(self, early: bool = False) -> None:
        """Leave the forward of a micro-batch, if one is under way: its precision, and what looks at it.

        Where that is `early`, because of an error, what it has left behind is not looked at.
        """
        forward, self._forward, self._gate.open = self._forward, None, False
        self._gate.returned.clear()
        if self._stray_check is not None:
            self._stray_check.close()
        if forward is not None and early:
            forward.__exit__(GeneratorExit, GeneratorExit(), None)
        elif forward is not None:
            forward.__exit__(None, None, None)

    def _microbatches(self) -> Iterator[MicroBatch]:
        """Yield what the loop is to compute, and finish the step where it is audited."""
        for part in [self._part] if self._audit is None else self._audit():
            self._part = part
            if not part.beside:
                self._engine.begin(part.microbatches, self._turn.step, self._leaves)
            if self._done:
                self._guard.withhold()
            yield from part.microbatches
            if self._audit is not None:
                self._guard.check(whole=False, modes=True)
                self._guard.give_back()  # an audit looks at the gradients
                part.sums = None if part.beside else self._engine.end()
        if self._audit is not None:
            self._guard.withhold()
            self._guard.mark()

    @property
    def _of(self) -> int:
        return len(self._turn.microbatches)

    @property
    def _complete(self) -> bool:
        """Whether the loop has computed all that it is to compute."""
        return self._begun and self._done >= self._of and (self._audit is None or self._part.sums is not None)

    def _seed_between(self, place: int) -> None:
        """Seed all generators by the step and this place in it, since ranks have drawn for other micro-batches."""
        seed_all(self._placed.world, random.extend_key(self._draws, place))


def _counts(turn: Turn, own_ones: Sequence[MicroBatch], microbatches: int) -> dict[int, str]:
    """Return what a loss must not be divided by, and what it counts: the sums of a step are divided by its weight."""
    own, samples = len(own_ones), max((each.samples for each in own_ones), default=1)
    return {
        own * samples: "the samples of this process's micro-batches",
        microbatches * samples: "the samples of as many micro-batches as the step has",
        turn.step.samples: "the number of samples of the step",
        turn.step.weight: "the weight of the step",
        own: "the number of this process's micro-batches",
        microbatches: "the number of micro-batches of the step",
    }
