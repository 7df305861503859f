"""A step of a custom training loop: its micro-batches, their backward passes, and the update."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Never, final

import torch
from torch import Tensor

from lockstep.common.user_code import find_calling_line, make_refusal
from lockstep.core.batch import Batch
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.examination import Examination
from lockstep.loop.forward import ForwardContext
from lockstep.loop.loss_check import LossCheck
from lockstep.loop.losses import (
    NamedLossArgument,
    has_named_losses,
    make_losses,
    make_missing_weights_error,
    parse_named_losses,
)
from lockstep.loop.model import Gate
from lockstep.loop.seeding import StepSeeder
from lockstep.loop.step_pass import StepPass
from lockstep.loop.step_sums import StepSums
from lockstep.loop.update_settings import make_update_settings
from lockstep.parallel.audited import Computation
from lockstep.parallel.losses import Losses
from lockstep.tasks.base import MicroBatch
from lockstep.training.plan import Interval
from lockstep.training.turn import TrainingStep

_NO_WEIGHTS: Final[Mapping[str, int]] = MappingProxyType({})

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
@dataclass(eq=False, repr=False)
class Step:
    """A step of `run.steps`: iterate over its micro-batches, call `backward` for each of them, and `update` at the end.

    To update groups of the optimizer separately, iterate over the micro-batches again before each `update(of=...)`.
    """

    _training_step: TrainingStep
    _gate: Gate
    _num_microbatches: int
    _placed: PlacedModel
    _open_stray_check: Callable[[PlacedModel, TrainingStep, int], bool]
    _get_loss_check: Callable[[int, str], LossCheck]
    _sums: StepSums
    _seeder: StepSeeder
    _audit: Callable[[], Iterator[Computation]] | None
    _examination: Examination | None = None  # set if a replay examines this step
    _is_careful: bool = False  # whether to repeat the checks of the first step

    def __post_init__(self) -> None:
        self._engine, self._guard = self._placed.engine, self._placed.guard
        self._pass = StepPass(self._training_step, self._placed, self._num_microbatches, self._audit)
        self._forward = ForwardContext(self._training_step.step, self._placed, self._gate, self._examination)
        self._duplicate = self._updated = self._saved = self._has_new_form = False
        self._seeder.seed_step_start()

    @property
    def number(self) -> int:
        """The number of this step, from 1."""
        return self._training_step.step.number + 1

    @property
    def epoch(self) -> int:
        """The index of the current epoch, from 0."""
        return self._training_step.step.epoch

    @property
    def samples(self) -> int:
        """The number of samples in this step, across all ranks."""
        return self._training_step.step.samples

    @property
    def samples_seen(self) -> int:
        """The number of samples in all earlier steps, across all ranks. Use it to compute the learning rate."""
        return self._training_step.step.samples_seen

    @property
    def weight(self) -> int:
        """The weight of the step across all ranks: the number of samples, or the sum of its micro-batches' weights.

        If you pass losses as `sum`, `update` divides their gradient by this weight. If you pass several losses by name,
        see `weights`.
        """
        return self._training_step.step.weight

    @property
    def weights(self) -> Mapping[str, int]:
        """The weight of each named loss in the step, across all ranks, if `weight` of `run.steps` returns a mapping.

        A loss that you pass as `sum` is divided by the weight of the same name.
        """
        return self._training_step.step.weights or _NO_WEIGHTS

    @property
    def updated(self) -> bool:
        """Whether `update` was called since the last iteration over the micro-batches began."""
        return self._updated

    @property
    def loss(self) -> Tensor:
        """The mean loss of the whole step, 0-dim and float64, the same on every rank. Available after `update`.

        If you pass several losses by name, this is the sum of their means.
        """
        if self._training_step.sums is None:
            raise make_refusal(
                f"step {self.number}: step.loss is not available before step.update", "read it after step.update"
            )
        return self._training_step.sums.loss

    @property
    def losses(self) -> Mapping[str, Tensor]:
        """The means of the losses that you pass by name: 0-dim and float64, the same on every rank.

        Available after `update`. The mean of a loss with weight 0 is 0.
        """
        if self._training_step.sums is None:
            raise make_refusal(
                f"step {self.number}: step.losses is not available before step.update", "read it after step.update"
            )
        return {name: loss.mean for name, loss in self._training_step.sums.named.items()}

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """The totals of `sum` over the whole step, by name: 0-dim and float64, the same on every rank.

        Available after `update`. Integers are exact up to 2**53. After `update(of=...)`, the totals cover only the
        iteration before this update.
        """
        if not self._updated:
            raise make_refusal(
                f"step {self.number}: step.sums is not available before step.update", "read it after step.update"
            )
        return self._sums.totals

    @property
    def norm(self) -> Tensor | None:
        """The L2 norm of the step's gradient before clipping. None before `update`, and if you didn't pass `clip`."""
        return None if self._training_step.update is None else self._training_step.update.norm

    @property
    def duplicate(self) -> bool:
        """Whether the current micro-batch is counted on a different rank. If True, exclude it from your own totals.

        Ranks process duplicates if the strategy shards weights and ranks would have different numbers of micro-batches,
        and if an audit repeats a micro-batch.
        """
        return self._duplicate

    def every(self, *, epochs: int | None = None, steps: int | None = None) -> bool:
        """Return whether this step ends a period of `epochs` epochs or of `steps` steps. Pass exactly one of them."""
        if (epochs is None) == (steps is None):
            raise make_refusal(f"step.every: got epochs={epochs} and steps={steps}", "pass exactly one of them")
        return Interval(steps, epochs).falls_on(self._training_step.step)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches of this rank on its device, as `collate` returns them: `for x, y in step`.

        From the start of a micro-batch to its `backward`, its own random numbers and the precision of the run are in
        effect. Ranks can have different numbers of micro-batches. Raises UsageError if you leave a step before its last
        micro-batch.
        """
        current = self._pass
        if current.has_begun:
            raise make_refusal(
                f"step {self.number}: its micro-batches are iterated over twice without step.update(of=...) in between",
                'end each iteration with an update of its own optimizer groups, such as step.update(of="D") for '
                '{"params": ..., "name": "D"}, or pass the sum of all losses to step.backward in a single iteration',
            )
        if self._saved:
            raise make_refusal(
                f"step {self.number}: its micro-batches are iterated over after run.save",
                "call run.save after the last update of a step, because a resumed run begins with the next step",
            )
        current.has_begun, self._updated = True, False
        self._sums.begin()
        self._gate.step = self._guard.step = self.number
        try:
            for microbatch in current.iterate_microbatches():
                is_first = not current.backward_count
                if not is_first:
                    self._guard.check(full=False, modes=True)
                checks_modules = is_first and self._open_stray_check(
                    self._placed, self._training_step, current.num_earlier_passes
                )
                self._duplicate = microbatch.is_dummy
                self._seeder.seed_microbatch(microbatch.index)
                self._forward.enter(
                    microbatch,
                    checks_modules=checks_modules,
                    is_extra=current.is_extra,
                    is_first=is_first,
                    iteration=current.num_earlier_passes,
                )
                yield microbatch.batch
                if self._forward.microbatch is not None:
                    raise make_refusal(
                        f"step {self.number}: step.backward was not called for micro-batch "
                        f"{current.backward_count + 1} of {current.num_expected}",
                        "call step.backward(mean=loss), not loss.backward(), for each micro-batch",
                    )
        finally:
            if current.is_complete:
                # Seed before the update, because a script may draw random numbers for the next step before it calls
                # `update`.
                self._seeder.seed_after_microbatches()
            else:
                current.left_at = find_calling_line()
                self._leave(early=True)

    def sum(self, **numbers: Tensor | float) -> None:
        """Add numbers over the micro-batches and all ranks, such as `step.sum(correct=(z.argmax(1) == y).sum())`.

        Call this method before the `backward` of the micro-batch, with the same names in every micro-batch. Pass 0-dim
        tensors, ints or floats. After `update`, the totals are in `sums`. Integers are added exactly, other numbers in
        float64 in a fixed order.
        """
        if self._forward.microbatch is None:
            outside = f"after {self._gate.end_description}" if self._pass.backward_count else "outside of a micro-batch"
            raise make_refusal(
                f"step {self.number}: step.sum was called {outside}",
                "call it in a micro-batch before step.backward, which adds up the loss and the sums together",
            )
        self._sums.add(self.number, numbers)

    def backward(
        self,
        *unnamed: Never,
        mean: Tensor | Mapping[str, Tensor] | None = None,
        sum: Tensor | Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add the gradient of a micro-batch to the gradient of the step. Call it once for each micro-batch.

        Pass a 0-dim loss, named after its reduction. `mean` is a mean over the micro-batch, such as
        `F.cross_entropy(model(x), y)`: over its samples, or over the counts that `weight` of `run.steps` returns. `sum`
        is a sum, as with `reduction="sum"`. In both cases, the gradient of the step is the gradient of the mean over
        the whole step. On one process with one micro-batch, `mean` gives the gradient of `loss.backward()`, bit for
        bit.

        For several losses with their own weights, pass them by name, such as `mean={"next": a, "second": b}`. `weight`
        of `run.steps` must return an integer for each name. The step computes the gradient of the sum of their means.
        Each mean is taken over the weight of its loss in the whole step. Some of the losses can be in `mean` and some
        in `sum`.

        Raises UsageError if the loss is passed as a positional argument, if a single loss is passed as both `mean` and
        `sum`, or if the loss evidently has the opposite reduction.
        """
        number = self.number
        if self._training_step.step.weights is not None:
            arguments = parse_named_losses(number, mean, sum, unnamed, self._training_step.step.weights)
            self._run_backward(self._require_microbatch(), *self._check_named_losses(arguments))
            return
        if unnamed or (mean is None) == (sum is None):
            if has_named_losses(mean, sum):
                raise make_missing_weights_error(number)
            problem = "both mean= and sum=" if mean is not None and sum is not None else "a loss without a name"
            raise make_refusal(
                f"step {number}: step.backward received {problem if unnamed or mean is not None else 'no loss'}",
                "use step.backward(mean=loss) if it is a mean, as most losses of PyTorch are by default, or "
                'step.backward(sum=loss) if it is a sum, as with reduction="sum"',
            )
        loss: Any = sum if mean is None else mean
        is_mean = mean is not None
        microbatch = self._require_microbatch()
        is_new_form = self._get_loss_check(self._pass.num_earlier_passes, "").check(
            number,
            loss,
            microbatch,
            self._num_microbatches,
            self._gate.output_nodes,
            mean=is_mean,
            has_weights=self._training_step.step.total_weight is not None,
            step_weight=self.weight,
            careful=self._is_careful,
        )
        self._has_new_form |= is_new_form
        self._forward.check_loss(loss, is_new_form=is_new_form)
        if is_mean and not microbatch.weight:
            for node in self._gate.output_nodes:  # the gradient of a mean over a weight of 0 is nan
                node.register_prehook(_zero_gradients)
        self._run_backward(microbatch, loss, is_mean)

    def _require_microbatch(self) -> MicroBatch:
        """Return the current micro-batch. Raises UsageError if there is none."""
        microbatch = self._forward.microbatch
        if microbatch is None:
            problem = (
                f"twice: {self._gate.end_description}" if self._pass.backward_count else "outside of a micro-batch"
            )
            raise make_refusal(
                f"step {self.number}: step.backward was called {problem}",
                "call it once for each micro-batch, within `for batch in step`, with the sum of all losses",
            )
        return microbatch

    def _check_named_losses(self, arguments: Sequence[NamedLossArgument]) -> tuple[Losses, bool]:
        """Check the named losses, and return them as `Losses`, together with False as `is_mean`."""
        microbatch, step = self._require_microbatch(), self._training_step.step
        assert microbatch.weights is not None
        is_new_form = False
        for name, loss, is_mean in arguments:
            is_new_form |= self._get_loss_check(self._pass.num_earlier_passes, name).check(
                self.number,
                loss,
                replace(microbatch, weight=microbatch.weights[name]),
                self._num_microbatches,
                self._gate.output_nodes,
                mean=is_mean,
                has_weights=True,
                step_weight=self.weights[name],
                careful=self._is_careful,
            )
        self._has_new_form |= is_new_form
        self._forward.check_loss(*(loss for _, loss, _ in arguments), is_new_form=is_new_form)
        return make_losses(arguments, microbatch, step, self._gate.output_nodes), False

    def _run_backward(self, microbatch: MicroBatch, loss: Tensor | Losses, is_mean: bool) -> None:
        """End the forward pass of a micro-batch, and run its backward pass."""
        number = self.number
        self._leave()
        self._guard.check(full=False, modes=True, forward=True)
        self._gate.end_batch()
        counts = self._sums.end_microbatch(number)
        self._guard.restore_gradients()
        self._forward.microbatch = None
        self._pass.backward_count += 1
        self._gate.recomputing = True
        try:
            if self._pass.is_extra:
                self._engine.backward_extra(microbatch, loss, self._training_step.step, mean=is_mean)
            else:
                self._engine.backward(microbatch, loss, mean=is_mean, counts=counts)
        finally:
            self._gate.recomputing = False
            if self._examination is not None:
                self._examination.stop_observing()
        self._guard.block_gradient_writes()
        self._guard.mark()
        self._gate.ended_at = self._guard.last

    def update(self, lr: float | None = None, clip: float | None = None, *, of: str | None = None) -> None:
        """Divide the gradient by the weight of the step, clip its L2 norm to `clip`, and update the weights.

        `lr` is the learning rate. It defaults to the rate of the scheduler if you passed one to `run.place`, and
        otherwise to the rate that the optimizer was created with. Groups keep the ratio of their rates. If you don't
        set `clip`, the gradient is not clipped. Pass `of`, the name of a group of the optimizer, to update only the
        groups with this name.

        Every rank must call this method with the same arguments, once for each step or once after each iteration with
        `of`.
        """
        number = self.number
        if self.updated:
            raise make_refusal(
                f"step {number}: step.update was called twice",
                "call it once for each step, or once with of= after each iteration over its micro-batches",
            )
        if of is None and self._pass.num_earlier_passes:
            raise make_refusal(
                f"step {number}: step.update without of= follows an update with of=, so it would also update the "
                "groups of that update",
                "pass of= with the name of a group to each update of the step",
            )
        if not self._pass.is_complete:
            raise self._make_unfinished_error()
        self._guard.check(full=False, updating=True)
        self._guard.restore_gradients()
        placed = self._placed
        settings = make_update_settings(number, placed, lr, clip, of, audited=self._pass.is_audited)
        self._sums.end(has_idle_ranks=placed.has_idle_ranks(self._num_microbatches))
        placed.register_update_settings(number, settings.rate, settings.clip, of, self._sums.names)
        self._gate.step = self._guard.step = 0
        sums = self._pass.reduce_sums()
        self._sums.store_totals(sums.counts)
        self._training_step.record_digest()
        if self._examination is None:
            updated = self._engine.update(settings.rate, settings.clip, settings.groups)
        else:
            update = partial(self._engine.update, settings.rate, settings.clip, settings.groups)
            updated = self._examination.run_update(update, all_groups=of is None)
        self._training_step.record_update(settings.reported_rate, sums, updated)
        self._updated = True
        if of is not None:
            self._pass.start_over()
        if placed.scheduler is not None:
            placed.scheduler.record_update()
        placed.audit.kept_state.record_step(self._training_step.step)
        if self._examination is not None and of is None:
            self._examination.report_step()  # before `update` returns, because the script may exit if step.loss is nan
        self._guard.mark(weights_changed=True)

    @property
    def _repeatable(self) -> bool:
        """Whether the script may iterate over the micro-batches again to update different groups."""
        return not self._pass.has_begun

    def _make_unfinished_error(self) -> Exception:
        """Return the error to raise if the loop leaves the step before its update."""
        return self._pass.make_unfinished_error()

    def _leave(self, early: bool = False) -> None:
        """Leave the context of the current forward pass, if there is one. Set `early` if it ended with an error."""
        self._forward.leave(early=early)


def _zero_gradients(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Replace the gradients of a node's outputs with zeros. Used as a prehook of an autograd node."""
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
