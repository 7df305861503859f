"""A step of a loop of the user's own: its micro-batches, their backwards and the update, and what must not be done.

A step that is audited (parallel/audited.py) gives the loop further micro-batches, which count for nothing: first the
one that this rank repeats, and where the ranks do not agree some to find out who is wrong. So it is finished when the
loop over micro-batches ends, and not by the update.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final, Never, final

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.common.own_code import calling, refusal
from lockstep.core import random
from lockstep.core.batch import Batch, tensors_of
from lockstep.data.items import seed_python_and_numpy
from lockstep.loop.examination import Examination
from lockstep.loop.loss_check import LossCheck
from lockstep.loop.model import Gate, StrayModuleCheck
from lockstep.loop.placed import Placed
from lockstep.loop.step_sums import ROOM, StepSums
from lockstep.parallel.audited import Part
from lockstep.tasks.base import MicroBatch
from lockstep.training.plan import Interval
from lockstep.training.turn import Turn

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours


# Places of a step that generators are seeded for.
_HEAD: Final = 0
_AFTER_MICROBATCHES: Final = 1
_MICROBATCH: Final = 2
AFTER_LOOP: Final = 3


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
    _sums: StepSums
    _audit: Callable[[], Iterator[Part]] | None
    _examination: Examination | None = None  # where a replay looks into the step

    def __post_init__(self) -> None:
        self._engine, self._guard = self._placed.engine, self._placed.guard
        self._part = Part(self._turn.microbatches)
        self._current: MicroBatch | None = None
        self._forward: AbstractContextManager[None] | None = None
        self._stray_check: StrayModuleCheck | None = None
        self._begun = self._duplicate = self._updated = self._saved = False
        self._done = 0  # backwards
        self._versions: dict[int, list[int]] = {}  # of the tensors of each micro-batch, when it was first gone through
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
        """The weight of the step over all ranks: its samples, or the sum of `weight` of `run.steps`.

        A loss that is given as `sum` is divided by it.
        """
        return self._turn.step.weight

    @property
    def updated(self) -> bool:
        """Whether `update` is done: after each iteration over the micro-batches anew."""
        return self._updated

    @property
    def loss(self) -> Tensor:
        """The mean loss of the whole step, 0-dim and float64, the same on every rank; after `update`."""
        if self._turn.sums is None:
            raise refusal(f"step {self.number}: step.loss is known after step.update", "ask for it then")
        return self._turn.sums.loss

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """The totals of `sum` over the whole step, by name: 0-dim and float64, the same on every rank; after `update`.

        Whole numbers are exact up to 2**53. After `update(of=...)` they are those of the iteration before it.
        """
        if not self._updated:
            raise refusal(f"step {self.number}: step.sums is known after step.update", "ask for it then")
        return self._sums.totals

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
            raise refusal(
                f"step {self.number}: its micro-batches are gone through a second time",
                'end each pass with an update of its own groups, such as step.update(of="D"), whose groups have names: '
                '{"params": ..., "name": "D"}; or give step.backward the sum of all losses in one pass',
            )
        if self._saved:
            raise refusal(
                f"step {self.number}: its micro-batches are gone through again after run.save",
                "save after the last update of a step: a resumed run begins with the next step",
            )
        self._begun, self._updated = True, False
        self._sums.begin()
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
                if self._examination is not None and not self._part.beside:
                    self._examination.enter(microbatch, self._phase)
                forward = self._engine.forward_beside if self._part.beside else self._engine.forward
                self._forward = forward(microbatch, self._turn.step)
                self._forward.__enter__()
                self._gate.open = True
                if not self._done:
                    self._placed.modes.check(self.number)
                self._guard.mark(modes=not self._done)
                self._check_unchanged(microbatch)
                yield microbatch.batch
                if self._current is not None:
                    raise refusal(
                        f"step {self.number}: no backward for micro-batch {self._done + 1} of {self._of}",
                        "call step.backward(mean=loss), not loss.backward(), for each",
                    )
        finally:
            if self._complete:
                # Here, and not after the update: numbers drawn before the update may be for the next step, too.
                self._seed_between(_AFTER_MICROBATCHES)
            else:
                self._where = calling()
                self._leave(early=True)

    def _check_unchanged(self, microbatch: MicroBatch) -> None:
        """Raise UsageError if an earlier pass over the step changed the tensors of a micro-batch in place."""
        versions = [each._version for each in tensors_of(microbatch.batch) if not each.is_inference()]
        if self._versions.setdefault(id(microbatch), versions) != versions:
            raise refusal(
                f"step {self.number}: an earlier pass changed its batch in place, and this one would get what it left",
                "make new tensors, such as x = x + noise in place of x += noise",
            )

    def sum(self, **numbers: Tensor | float) -> None:
        """Add numbers over the micro-batches of the step and over ranks: `step.sum(correct=(z.argmax(1) == y).sum())`.

        Call it before the `backward` of the micro-batch, with the same names in each. Numbers are 0-dim tensors, ints
        or floats. After `update`, `sums` has the totals: whole numbers exactly, others in one order in float64.
        """
        if self._current is None:
            raise refusal(
                f"step {self.number}: step.sum {self._outside}",
                "call it before the step.backward of its micro-batch, whose loss and sums are added up together",
            )
        self._sums.add(self.number, numbers)

    def backward(self, *unnamed: Never, mean: Tensor | None = None, sum: Tensor | None = None) -> None:
        """Add the gradient of a micro-batch to the gradient of the step; call it once for each micro-batch.

        Name the loss by the way your script reduces it. `mean` is the mean over the micro-batch, as
        `F.cross_entropy(model(x), y)` is: over its samples, or over what `weight` of `run.steps` counts. `sum` is the
        sum, as with `reduction="sum"`. Either way the step's gradient is that of the mean over the whole step, and on
        one process with one micro-batch `mean` gives the gradient of `loss.backward()`, bit for bit. The loss is 0-dim.

        UsageError if a loss is given without a name, if both are given, or if the loss is evidently the other one.
        """
        if unnamed or (mean is None) == (sum is None):
            found = "both mean= and sum=" if mean is not None and sum is not None else "a loss without its name"
            raise refusal(
                f"step {self.number}: step.backward was given {found if unnamed or mean is not None else 'no loss'}",
                "name it: step.backward(mean=loss) if it is a mean, as most losses of torch are by default, or "
                'step.backward(sum=loss) if it is a sum, as with reduction="sum"',
            )
        loss, is_mean = (sum, False) if mean is None else (mean, True)
        assert loss is not None
        microbatch = self._current
        if microbatch is None:
            what = f"a second backward: {self._gate.ended}" if self._done else "a backward outside of a micro-batch"
            raise refusal(
                f"step {self.number}: {what}",
                "call step.backward once for each micro-batch, within `for batch in step`, with all losses added up",
            )
        self._losses(self._phase).check(
            self.number,
            loss,
            microbatch,
            self._leaves,
            self._gate.returned,
            mean=is_mean,
            weighs=self._turn.step.counted is not None,
            step_weight=self.weight,
        )
        if self._stray_check is not None:
            self._stray_check.check_leaves(self.number, loss)
        if is_mean and not microbatch.weight:
            for node in self._gate.returned:  # a mean over nothing has gradients of 0 / 0
                node.register_prehook(_zeros)
        if self._examination is not None:
            self._examination.note_loss(loss)
        self._leave()
        self._guard.check(whole=False, modes=True, forward=True)
        self._gate.end_batch()
        counts = self._sums.end_microbatch(self.number)
        self._guard.give_back()
        self._current = None
        self._done += 1
        self._gate.recomputing = True
        try:
            if self._part.beside:
                self._engine.backward_beside(microbatch, loss, self._turn.step, mean=is_mean)
            else:
                self._engine.backward(microbatch, loss, mean=is_mean, counts=counts)
        finally:
            self._gate.recomputing = False
            if self._examination is not None:
                self._examination.leave()
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
        self._sums.end(some_idle=self._placed.some_idle(self._leaves))
        self._placed.agree(self.number, rate, clip, of, self._sums.names)
        self._gate.step = self._guard.step = 0
        sums = self._part.sums or self._engine.end()
        self._sums.take(sums.counts)
        update = partial(self._engine.update, rate, clip, only)
        if self._examination is not None:
            update = partial(self._examination.update, update, whole=only is None)
        self._turn.digest()
        self._turn.done(shown, sums, update())
        self._updated = True
        if only is not None:
            self._phase += 1
            self._begun, self._done, self._part = False, 0, Part(self._turn.microbatches)
        if scheduler is not None:
            scheduler.note_update()
        self._placed.audit.kept.note(self._turn.step)
        if self._examination is not None and only is None:
            self._examination.finish()  # here, since a script may end where step.loss is nan
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
        if self._examination is not None and early:
            self._examination.leave()

    def _microbatches(self) -> Iterator[MicroBatch]:
        """Yield what the loop is to compute, and finish the step where it is audited."""
        for part in [self._part] if self._audit is None else self._audit():
            self._part = part
            if not part.beside:
                self._engine.begin(part.microbatches, self._turn.step, self._leaves, ROOM)
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
    def _outside(self) -> str:
        """What is wrong with a call between two micro-batches."""
        return f"after {self._gate.ended}" if self._done else "outside of a micro-batch"

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


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return zeros in place of the gradients of a node's outputs."""
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
