"""The context in which a custom loop computes the forward pass of a micro-batch."""

from contextlib import AbstractContextManager
from typing import final

from torch import Tensor

from lockstep.common.user_code import make_refusal
from lockstep.core.batch import get_tensors
from lockstep.core.order import Step
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.examination import Examination
from lockstep.loop.model import Gate
from lockstep.tasks.base import MicroBatch

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class ForwardContext:
    """Prepares the forward pass of each micro-batch in a step: enters the context of the engine and allows model calls.

    If a replay examines the step, `examination` observes each forward pass.
    """

    def __init__(self, step: Step, placed: PlacedModel, gate: Gate, examination: Examination | None) -> None:
        self.microbatch: MicroBatch | None = None  # the current micro-batch, until its backward pass begins
        self._step = step
        self._placed = placed
        self._gate = gate
        self._examination = examination
        self._context: AbstractContextManager[None] | None = None
        self._checks_modules = False  # whether module calls are checked in this micro-batch
        self._versions: dict[int, list[int]] = {}  # the version counters of each micro-batch's tensors, by id

    def enter(
        self,
        microbatch: MicroBatch,
        *,
        checks_modules: bool,
        is_extra: bool,
        is_first: bool,
        iteration: int,
    ) -> None:
        """Begin a micro-batch of the step.

        - `checks_modules`: Whether the stray check is open.
        - `is_extra`: Whether an audit added this micro-batch to the step.
        - `is_first`: Whether this is the first micro-batch of the current iteration over the step.
        - `iteration`: The index of the current iteration. A step has one iteration per update.
        """
        number, engine = self._step.number + 1, self._placed.engine
        if self._examination is not None and not is_extra:
            self._examination.start_observing(microbatch, iteration)
        self.microbatch, self._checks_modules = microbatch, checks_modules
        forward = engine.forward_extra if is_extra else engine.forward
        self._context = forward(microbatch, self._step)
        self._context.__enter__()
        self._gate.begin_batch()
        if is_first:
            self._placed.modes.check_late_changes(number)
        self._placed.guard.mark(modes=is_first)
        # Iterations over the same step share the batch, so none of them may modify it in place.
        versions = [tensor._version for tensor in get_tensors(microbatch.batch) if not tensor.is_inference()]
        if self._versions.setdefault(id(microbatch), versions) != versions:
            raise make_refusal(
                f"step {number}: an earlier iteration modified the batch in place, so this iteration would get the "
                f"modified batch",
                "create new tensors, such as x = x + noise instead of x += noise",
            )

    def check_loss(self, *losses: Tensor, is_new_form: bool) -> None:
        """Raise UsageError if a loss of the micro-batch depends on something trained outside the placed model.

        Checks the losses if they have a new form, or if module calls are checked in this micro-batch.
        """
        if self._checks_modules or is_new_form:
            for loss in losses:
                self._placed.stray_check.check_loss(self._step.number + 1, loss)
        if self._examination is not None:
            self._examination.record_loss(*losses)

    def leave(self, *, early: bool = False) -> None:
        """Leave the context of the current forward pass, if there is one, and close its checks and observers.

        Set `early` if the forward pass ended with an error. In this case, the state of the engine isn't checked.
        """
        context, self._context, self._gate.open = self._context, None, False
        self._gate.output_nodes.clear()
        if self._checks_modules:
            self._placed.stray_check.close()
        if context is not None and early:
            context.__exit__(GeneratorExit, GeneratorExit(), None)
        elif context is not None:
            context.__exit__(None, None, None)
        if self._examination is not None and early:
            self._examination.stop_observing()
