"""Begins and ends each step of a custom loop, and runs the checks before and after the step."""

from collections.abc import Callable, Iterator
from typing import final

from torch import nn

from lockstep.common.user_code import make_refusal
from lockstep.core import random
from lockstep.loop.call_agreement import SameCallCheck
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.evaluation import Evaluation
from lockstep.loop.examination import Examination
from lockstep.loop.guard import is_careful
from lockstep.loop.logged_values import LoggedMetrics
from lockstep.loop.loss_check import LossCheck
from lockstep.loop.member import Member
from lockstep.loop.model import Gate
from lockstep.loop.model_modes import find_mode_dependent_layer, is_in_evaluation_mode
from lockstep.loop.plan import LoopPlan
from lockstep.loop.seeding import StepSeeder
from lockstep.loop.state import ScriptState, compute_state_digests
from lockstep.loop.step import Step
from lockstep.loop.step_sums import StepSums
from lockstep.parallel.audited import Computation
from lockstep.training.reports import StepReporter
from lockstep.training.turn import TrainingStep

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class StepSequence:
    """Holds the current step, and the state that the steps of all loops over `run.steps` share."""

    def __init__(
        self,
        member: Member,
        gate: Gate,
        call_check: SameCallCheck,
        metrics: LoggedMetrics,
        evaluation: Evaluation,
        state: ScriptState,
    ) -> None:
        self._rank = member.rank
        self._observe = member.observe
        self._gate = gate
        self._call_check = call_check
        self._metrics = metrics
        self._evaluation = evaluation
        self._state = state
        self._step: Step | None = None
        self._training_step: TrainingStep | None = None  # the data and the results of the current step
        self._reports: StepReporter | None = None  # the reports of the current loop
        # Loss checks, keyed by (index of the update within the step, name of the loss).
        self._loss_checks: dict[tuple[int, str], LossCheck] = {}
        self._num_checked_updates = 0  # the number of updates per step whose module calls are already checked
        self._num_steps = 0  # the number of steps that this process has begun
        self._has_new_form = False  # whether a loss of the last step had a new form
        self._is_careful = True  # whether the current step repeats the checks of the first step
        self._sums = StepSums(self._rank.world)  # the sums of the current step
        self._has_loops = False
        self._draws_key = random.make_key(random.OWN_LOOP, member.settings.seed)
        self._plan: LoopPlan

    def begin_loop(self) -> bool:
        """Record that a loop begins. Returns whether this is the first loop of the run."""
        had_loops, self._has_loops = self._has_loops, True
        return not had_loops

    def begin(
        self,
        placed: PlacedModel,
        plan: LoopPlan,
        training_step: TrainingStep,
        reports: StepReporter,
        audit: Callable[[], Iterator[Computation]] | None,
        examination: Examination | None,
    ) -> Step:
        """Return the next step for the user's loop."""
        self._rank.phase = "training"
        self._reports, self._plan = reports, plan
        placed.modes.restore()
        self._metrics.warn_about_differences()
        self._evaluation.warn_if_not_summed()
        self._training_step = training_step
        self._state.forget_save()
        placed.groups.forget_save()
        self._is_careful = self._has_new_form or is_careful(self._num_steps)
        self._num_steps += 1
        self._step = Step(
            training_step,
            self._gate,
            min(plan.microbatches, training_step.step.samples),
            placed,
            _open_stray_check=self._open_stray_check,
            _get_loss_check=self._get_loss_check,
            _sums=self._sums,
            _seeder=StepSeeder(self._rank.world, self._draws_key, training_step.step.number),
            _audit=audit,
            _examination=examination,
            _is_careful=self._is_careful,
        )
        placed.guard.mark()
        return self._step

    def end(self, placed: PlacedModel) -> None:
        """End the current step when the loop requests the next step. Raises UsageError if the step has no update."""
        assert self._step is not None
        assert self._training_step is not None
        self._call_check.check_early_exits()
        placed.guard.check(full=False)
        if not self._step.updated:
            raise self._step._make_unfinished_error()
        if placed.scheduler is not None:
            placed.scheduler.check_saved(self._step.number)
        placed.groups.check_saved(self._step.number)
        self._state.check_saved(self._step.number)
        placed.modes.end_step()
        self._has_new_form = self._step._has_new_form
        self._step = None
        if self._observe is not None:
            assert self._training_step.sums is not None
            digests = {**placed.compute_digests(), **compute_state_digests(self._state.get_tensors())}
            self._observe(self._training_step.step.number + 1, float(self._training_step.sums.loss), digests)

    @property
    def is_after_loop(self) -> bool:
        """Whether a loop has ended, and no other loop has begun a step."""
        return self._has_loops and self._step is None

    def refuse_within_step(self, call: str) -> None:
        """Raise UsageError if `call` is made within a step, before its update."""
        if self._step is not None and not self._step.updated:
            raise make_refusal(f"{call}: called within step {self._step.number}", "call it after step.update")

    def report(self) -> None:
        """Write the events of the last step, unless they are already written. All ranks must call this method."""
        if self._training_step is not None and self._reports is not None:
            for event in self._reports.report(self._training_step):
                self._rank.write(event)

    def report_if_complete(self) -> None:
        """Report the step, unless the loop can still iterate over it again. In that case, it is reported later."""
        if self._step is not None and not self._step._repeatable:
            self.report()

    def report_saved(self) -> None:
        """Report the step before a save. All ranks must call this method.

        Raises TrainingError if a loss wasn't finite.
        """
        if self._step is None:
            return
        self._step._saved = True
        if self._step.updated and self._reports is not None:
            self.report()
            self._reports.check()  # also checks the losses of steps that aren't reported

    def leave_unfinished(self) -> Exception | None:
        """If the current step has no update yet, end it and return an error that says so. Otherwise, return None."""
        if self._step is None or self._step.updated:
            return None
        self._step._leave(early=True)
        return self._step._make_unfinished_error()

    def abandon(self) -> None:
        """Leave the current step even if it has no update yet."""
        if self._step is not None:
            self._step._leave(early=True)
            self._step = None

    def _get_loss_check(self, update_index: int, name: str) -> LossCheck:
        """Return the LossCheck for a loss. `update_index` is the index of the update within the step, from 0.

        `name` is the name of the loss, or "" if a step has a single loss.
        """
        if (update_index, name) not in self._loss_checks:
            self._loss_checks[update_index, name] = LossCheck(self._rank.world.size, self._rank.warn, name)
        return self._loss_checks[update_index, name]

    def _open_stray_check(self, placed: PlacedModel, training_step: TrainingStep, update_index: int) -> bool:
        """Start checking module calls before an update within a step. Returns False if this isn't necessary."""
        if self._num_checked_updates > update_index:
            if self._is_careful:
                placed.stray_check.open()
            return self._is_careful
        self._num_checked_updates = update_index + 1
        if placed.placed_in_evaluation:
            _check_mode(placed.model)
        placed.stray_check.open(training_step.microbatches[0].num_samples, self._plan.single_sample_note)
        return True


def _check_mode(model: nn.Module) -> None:
    """Raise UsageError if the model is in evaluation mode and has a layer that depends on the mode."""
    if is_in_evaluation_mode(model) and (layer := find_mode_dependent_layer(model)):
        raise make_refusal(
            f"the model is in evaluation mode, as from_pretrained and lockstep.load return it, but the result of "
            f"{layer}, depends on the mode",
            "call model.train() before the loop; to train in evaluation mode on purpose, call model.train() before "
            "run.place and model.eval() after it",
        )
