"""A step of a loop of the user's own: its micro-batches, their backwards and the update, and what must not be done."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Never, final

import torch
from torch import Tensor

from lockstep.common.own_code import calling, refusal
from lockstep.core.batch import Batch
from lockstep.loop.examination import Examination
from lockstep.loop.forward import Forward
from lockstep.loop.loss_check import LossCheck
from lockstep.loop.model import Gate, StrayModuleCheck
from lockstep.loop.placed import Placed
from lockstep.loop.seeding import StepDraws
from lockstep.loop.step_pass import StepPass
from lockstep.loop.step_sums import StepSums
from lockstep.loop.update_settings import update_settings
from lockstep.parallel.audited import Part
from lockstep.training.plan import Interval
from lockstep.training.turn import Turn

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours


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
        self._pass = StepPass(self._turn, self._placed, self._leaves, self._audit)
        self._forward = Forward(self._turn.step, self._placed, self._gate, self._examination)
        self._duplicate = self._updated = self._saved = False
        self._draws = StepDraws(self._placed.world, self._placed.settings.seed, self._turn.step.number)
        self._draws.seed_head()

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
        current = self._pass
        if current.begun:
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
        current.begun, self._updated = True, False
        self._sums.begin()
        self._gate.step = self._guard.step = self.number
        try:
            for microbatch in current.microbatches():
                first = not current.done
                if not first:
                    self._guard.check(whole=False, modes=True)
                stray_check = self._make_stray_check(current.number) if first else None
                self._duplicate = microbatch.dummy
                self._draws.seed_microbatch(microbatch.index)
                self._forward.enter(
                    microbatch, stray_check, beside=current.beside, first=first, iteration=current.number
                )
                yield microbatch.batch
                if self._forward.microbatch is not None:
                    raise refusal(
                        f"step {self.number}: no backward for micro-batch {current.done + 1} of {current.expected}",
                        "call step.backward(mean=loss), not loss.backward(), for each",
                    )
        finally:
            if current.complete:
                # Here, and not after the update: numbers drawn before the update may be for the next step, too.
                self._draws.seed_after_microbatches()
            else:
                current.left_at = calling()
                self._leave(early=True)

    def sum(self, **numbers: Tensor | float) -> None:
        """Add numbers over the micro-batches of the step and over ranks: `step.sum(correct=(z.argmax(1) == y).sum())`.

        Call it before the `backward` of the micro-batch, with the same names in each. Numbers are 0-dim tensors, ints
        or floats. After `update`, `sums` has the totals: whole numbers exactly, others in one order in float64.
        """
        if self._forward.microbatch is None:
            outside = f"after {self._gate.ended}" if self._pass.done else "outside of a micro-batch"
            raise refusal(
                f"step {self.number}: step.sum {outside}",
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
        microbatch = self._forward.microbatch
        if microbatch is None:
            what = (
                f"a second backward: {self._gate.ended}" if self._pass.done else "a backward outside of a micro-batch"
            )
            raise refusal(
                f"step {self.number}: {what}",
                "call step.backward once for each micro-batch, within `for batch in step`, with all losses added up",
            )
        self._losses(self._pass.number).check(
            self.number,
            loss,
            microbatch,
            self._leaves,
            self._gate.returned,
            mean=is_mean,
            weighs=self._turn.step.counted is not None,
            step_weight=self.weight,
        )
        self._forward.check_loss(loss)
        if is_mean and not microbatch.weight:
            for node in self._gate.returned:  # a mean over nothing has gradients of 0 / 0
                node.register_prehook(_zeros)
        self._leave()
        self._guard.check(whole=False, modes=True, forward=True)
        self._gate.end_batch()
        counts = self._sums.end_microbatch(self.number)
        self._guard.give_back()
        self._forward.microbatch = None
        self._pass.done += 1
        self._gate.recomputing = True
        try:
            if self._pass.beside:
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
        if not self._pass.complete:
            raise self._unfinished()
        self._guard.check()
        self._guard.give_back()
        placed = self._placed
        given = update_settings(self.number, placed, lr, clip, of, audited=self._pass.audited)
        self._sums.end(some_idle=placed.some_idle(self._leaves))
        placed.agree(self.number, given.rate, given.clip, of, self._sums.names)
        self._gate.step = self._guard.step = 0
        sums = self._pass.sums()
        self._sums.take(sums.counts)
        update = partial(self._engine.update, given.rate, given.clip, given.groups)
        if self._examination is not None:
            update = partial(self._examination.update, update, whole=of is None)
        self._turn.digest()
        self._turn.done(given.shown, sums, update())
        self._updated = True
        if of is not None:
            self._pass.start_over()
        if placed.scheduler is not None:
            placed.scheduler.note_update()
        placed.audit.kept.note(self._turn.step)
        if self._examination is not None and of is None:
            self._examination.finish()  # here, since a script may end where step.loss is nan
        self._guard.mark(moved=True)

    @property
    def _repeatable(self) -> bool:
        """Whether the micro-batches can be gone through again, for an update of other groups."""
        return not self._pass.begun

    def _unfinished(self) -> Exception:
        """Return the error for a step that was left before its update."""
        return self._pass.unfinished()

    def _leave(self, early: bool = False) -> None:
        """Leave the forward of a micro-batch, if one is under way."""
        self._forward.leave(early=early)


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return zeros in place of the gradients of a node's outputs."""
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
