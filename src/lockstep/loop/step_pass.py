"""An iteration of a custom loop over the micro-batches of a step, and its progress.

An audited step (parallel/audited.py) yields extra micro-batches, which don't contribute to the gradient. The first
extra micro-batch is the micro-batch that this rank recomputes. If two ranks get different results, more extra
micro-batches follow to find the faulty rank. Therefore the gradient of an audited step is reduced right after the
regular micro-batches, and not in the update.
"""

from collections.abc import Callable, Iterator
from multiprocessing import parent_process
from typing import final

from lockstep.common.user_code import make_refusal
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.step_sums import MAX_SUMS
from lockstep.parallel.audited import Computation
from lockstep.parallel.engine import Sums
from lockstep.tasks.base import MicroBatch
from lockstep.training.turn import TrainingStep

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class StepPass:
    """One iteration over this rank's micro-batches of a step. A step has one iteration per update.

    `num_microbatches` is the number of micro-batches of the step across all ranks. `audit` yields the computations of
    an audited step.
    """

    def __init__(
        self,
        training_step: TrainingStep,
        placed: PlacedModel,
        num_microbatches: int,
        audit: Callable[[], Iterator[Computation]] | None = None,
    ) -> None:
        self._training_step = training_step
        self._engine, self._guard = placed.engine, placed.guard
        self._num_microbatches = num_microbatches
        self._audit = audit
        self._computation = Computation(training_step.microbatches)
        self.num_earlier_passes = 0  # the number of earlier iterations, which ended with an update
        self.has_begun = False
        self.backward_count = 0  # the number of completed backward passes
        self.left_at = ""  # the line where the script left the loop early, if it did

    @property
    def is_audited(self) -> bool:
        """Whether the step is audited."""
        return self._audit is not None

    @property
    def is_extra(self) -> bool:
        """Whether the current micro-batch is an extra micro-batch of an audit."""
        return self._computation.is_extra

    @property
    def num_expected(self) -> int:
        """The number of micro-batches of this rank, without the extra micro-batches of an audit."""
        return len(self._training_step.microbatches)

    @property
    def is_complete(self) -> bool:
        """Whether the loop has processed all micro-batches of this iteration."""
        return (
            self.has_begun
            and self.backward_count >= self.num_expected
            and (self._audit is None or self._computation.sums is not None)
        )

    def iterate_microbatches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches that the loop must process. In an audited step, also reduces the gradient."""
        for part in [self._computation] if self._audit is None else self._audit():
            self._computation = part
            if not part.is_extra:
                self._engine.begin(part.microbatches, self._training_step.step, self._num_microbatches, MAX_SUMS)
            if self.backward_count:
                self._guard.block_gradient_writes()
            yield from part.microbatches
            if self._audit is not None:
                self._guard.check(full=False, modes=True)
                self._guard.restore_gradients()  # the audit reads the gradients, so it can't use the stand-ins
                part.sums = None if part.is_extra else self._engine.end()
        if self._audit is not None:
            self._guard.block_gradient_writes()
            self._guard.mark()

    def reduce_sums(self) -> Sums:
        """Return the sums of the step over all ranks. Reduces the gradient, unless the audit has already reduced it."""
        return self._computation.sums or self._engine.end()

    def start_over(self) -> None:
        """Prepare for another pass over the step, after an update of some parameter groups."""
        self.num_earlier_passes += 1
        self.has_begun, self.backward_count, self._computation = False, 0, Computation(self._training_step.microbatches)

    def make_unfinished_error(self) -> Exception:
        """Return the error to raise if the loop leaves the step before its update."""
        number = self._training_step.step.number + 1
        # In a worker of mp.spawn, torch catches an exception of the script, and reports it after the run is closed.
        cause = "if an exception ended this process, see its traceback; otherwise " if parent_process() else ""
        if not self.is_complete:
            return make_refusal(
                f"step {number}: the loop left the step after {self.backward_count} of {self.num_expected} "
                "micro-batches",
                f"{cause}let `for batch in step` run to its end, with a step.backward for each micro-batch, because "
                f"other ranks wait for them",
                self.left_at,
            )
        return make_refusal(
            f"step {number}: the loop left the step without step.update", f"{cause}call step.update once for each step"
        )
