"""Evaluation in a custom loop: implements `run.each` and `run.sum`."""

from collections.abc import Generator, Iterator
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import Any, final
from weakref import ref

from lockstep.common.user_code import find_calling_line, make_refusal
from lockstep.core import random
from lockstep.core.batch import Batch
from lockstep.data.loader import Loader
from lockstep.loop.call_agreement import SameCallCheck
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.model import Gate, preserve_modes
from lockstep.loop.seeding import seed_all
from lockstep.loop.sums import EvaluationPass, sum_values
from lockstep.run.rank import Rank

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class Evaluation:
    """Implements `run.each` and `run.sum`. An evaluation pass is one iteration over `run.each`."""

    def __init__(self, rank: Rank, gate: Gate, call_check: SameCallCheck, seed: int) -> None:
        self._rank = rank
        self._gate = gate
        self._call_check = call_check
        self._seed = seed
        self._pass = EvaluationPass()
        # The iterator of the last evaluation pass. This is a weak reference, so that the pass ends when the script
        # drops the iterator.
        self._batches: ref[Generator[Batch, None, None]] | None = None
        self._warned = False
        self.default_batch = 0  # samples per batch if the script doesn't pass `batch`

    @property
    def current_batch_id(self) -> int:
        """An id of the current micro-batch or evaluation batch, or 0 between batches.

        Each batch of an evaluation pass has a different id.
        """
        return self._gate.open and 1 + len(self._pass.batch_numbers)

    def resolve_batch_size(self, batch: int | None) -> int:
        """Return `batch` if it is set, and otherwise the size of the largest micro-batch of `run.steps`."""
        samples = batch or self.default_batch
        if not samples:
            raise make_refusal("run.each: batch is not set, and no earlier run.steps provides a default", "pass batch=")
        return samples

    def iterate_batches(self, placed: PlacedModel, loader: Loader, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's batches, with the model in evaluation mode and gradients disabled.

        `batch_size` is the number of samples per batch, as returned by `resolve_batch_size`.
        """
        batches = self._generate_batches(placed, loader, batch_size)
        self._batches = ref(batches)
        return batches

    def close_pass(self) -> None:
        """End an evaluation pass that the script left early, if its iterator still exists.

        A caught exception, for example, can keep the iterator alive. Garbage collection would then end the pass at an
        arbitrary later time, and ending a pass enables gradients and seeds the random number generators.
        """
        batches = None if self._batches is None else self._batches()
        if batches is not None and getgeneratorstate(batches) == GEN_SUSPENDED:
            batches.close()

    def _generate_batches(self, placed: PlacedModel, loader: Loader, batch_size: int) -> Generator[Batch, None, None]:
        self._call_check.refuse_within_batch("run.each")  # two overlapping passes would leave gradients disabled
        self.warn_if_not_summed()
        current_pass = self._pass = EvaluationPass(loader.count_validation_batches(batch_size))
        gate, guard, world = self._gate, placed.guard, self._rank.world
        draws = random.make_key(random.OWN_LOOP, self._seed, self._rank.progress.step, random.EVALUATION)
        try:
            placed.audit.kept_state.discard_digests()
            with preserve_modes(placed.model), self._rank.during("evaluating"), placed.engine.custom_evaluation():
                guard.mark(weights_changed=True)  # averaged weights replace the trained weights during the pass
                for number, batch, _ in loader.iterate_validation_batches(batch_size):
                    current_pass.batch_numbers.append(number)
                    gate.has_called_collective = False
                    seed_all(world, random.extend_key(draws, number or 0))
                    gate.begin_batch()
                    guard.mark(modes=True)
                    yield batch
                    guard.check(modes=True, frozen=True)
                    gate.end_batch()
                    gate.open = False
                current_pass.is_complete = True
        finally:
            if not current_pass.is_complete:
                self._call_check.record_early_exit(find_calling_line() or "run.each")
            gate.open = False
            seed_all(world, draws)  # RNG states differ between ranks, which evaluated different batches
            guard.mark(weights_changed=True)

    def sum(self, values: Any) -> Any:
        """Sum values of the last evaluation pass over its batches and all ranks. See `Run.sum`."""
        # Look up the pass only after `values` is consumed, because `values` can be a generator that runs the pass.
        return sum_values(self._rank.world, values, lambda: self._pass)

    def warn_if_not_summed(self) -> None:
        """Warn once if the script didn't sum the results of the last evaluation pass over several ranks."""
        if self._rank.world.size > 1 and self._pass.is_local and not (self._gate.has_called_collective or self._warned):
            self._warned = True
            self._rank.warn(
                "run.each: the results were not summed over ranks, so what rank 0 prints or saves covers only its own "
                "batches; pass run.sum one value for each batch"
            )
