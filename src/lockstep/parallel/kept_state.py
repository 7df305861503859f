"""Detects weights and optimizer state that change on a rank between two steps.

Weights and optimizer state must not change between an update and the next step. If their digests change, the memory of
the rank is faulty. Unlike a comparison between ranks, this check also covers rows that only one rank holds.
"""

from contextlib import AbstractContextManager
from typing import final

from lockstep.comm.world import World
from lockstep.common.patterns import list_some
from lockstep.core.audit_schedule import is_due
from lockstep.core.digest import Digests
from lockstep.core.order import Step
from lockstep.errors import CorruptionError
from lockstep.parallel.audit_digests import (
    ComparedResult,
    RankDigests,
    describe_flipped_bit,
    digest_tensors,
    short_hash,
)
from lockstep.parallel.corruption import MAX_SHOWN_NAMES, REMOVE_HOST, format_ranks
from lockstep.parallel.engine import Engine, PredictFunction, State, Update


@final
class StateChangeDetector:
    """Checks that the state of `engine` on this rank doesn't change between an update and the next audited step.

    Every `interval`-th step is audited, or no step if `interval` is None. Call `update`, `evaluation` and `load`
    instead of the methods of the engine, and set `step` to the step in progress.
    """

    step: Step

    def __init__(self, engine: Engine, world: World, interval: int | None) -> None:
        self._engine = engine
        self._world = world
        self._interval = interval
        self._digests = Digests()
        self._saved: RankDigests | None = None

    def begin(self) -> None:
        """Record digests of the state. Call this after the weights are initialized or a checkpoint is loaded."""
        self._saved = None if self._interval is None else self._digest_state()

    def record_step(self, step: Step) -> None:
        """Record digests of the state if the next step is audited. Call this after the update of `step`."""
        due = self._interval is not None and is_due(step.number + 1, self._interval)
        self._saved = self._digest_state() if due else None

    def update(self, lr: float, max_norm: float | None) -> Update:
        """See Engine."""
        update = self._engine.update(lr, max_norm)
        self.record_step(self.step)
        return update

    def evaluation(self) -> AbstractContextManager[PredictFunction]:
        """See Engine."""
        self.discard_digests()
        return self._engine.evaluation()

    def load(self, state: State) -> None:
        """See Engine."""
        self._engine.load(state)
        self.begin()

    def discard_digests(self) -> None:
        """Discard the recorded digests. Call this before an evaluation, which may change buffers of the model."""
        self._saved = None

    def check(self, step: Step) -> RankDigests:
        """Compare this rank's state with the recorded digests, and return its digests. Call this on all ranks.

        Raises CorruptionError on all ranks if the state of any rank has changed since its last update.
        """
        findings, saved = self._digest_state(), self._saved
        self._saved = None
        reports = self._world.all_gather_json(
            {"host": self._world.host, "changed": _find_change(saved or findings, findings)}
        )
        if changed_ranks := [rank for rank, report in enumerate(reports) if report["changed"]]:
            kind, names, bit = reports[changed_ranks[0]]["changed"]
            label = f"{kind} ({list_some(names, MAX_SHOWN_NAMES)}{bit})"
            since = f"the update of step {step.number}" if step.number else "the start"
            raise CorruptionError(
                f"audit at step {step.number + 1}: {label} of {format_ranks(changed_ranks, reports)} changed after "
                f"{since}, although no code writes to this memory. {REMOVE_HOST}",
                changed_ranks,
            )
        return findings

    def _digest_state(self) -> RankDigests:
        state = self._engine.state()
        return [
            *digest_tensors(self._digests, "the weights", state.model),
            *digest_tensors(self._digests, "the optimizer state", state.optimizer),
            (ComparedResult("the counters"), {name: short_hash(value) for name, value in state.scalars.items()}),
            *digest_tensors(self._digests, "the averaged weights", state.ema or {}),
        ]


def _find_change(before: RankDigests, current: RankDigests) -> tuple[str, list[str], str] | None:
    """Return the first result that changed, or None: its kind, the names of its changed tensors and the flipped bit."""
    for (subject, old), (_, new) in zip(before, current, strict=True):
        if old != new:
            names = [name for name in new if old.get(name) != new[name]]
            return subject.kind, names, describe_flipped_bit(subject, names, old, new)
    return None
