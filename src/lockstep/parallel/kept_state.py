"""Detects state that changed on a rank between two steps.

If only one rank holds the rows of a tensor, no other rank can verify these rows. However, weights and optimizer state
must not change between the end of an update and the next step. If their digests differ, the memory of the rank is
faulty. This check works without other ranks that hold the same rows.
"""

from contextlib import AbstractContextManager
from typing import final

from lockstep.comm.world import World
from lockstep.common.patterns import list_some
from lockstep.core.audit_schedule import is_due
from lockstep.core.digest import Digests
from lockstep.core.order import Step
from lockstep.errors import CorruptionError
from lockstep.parallel.audit_digests import ComparedResult, Findings, describe_flipped_bit, short_hash, tensor_findings
from lockstep.parallel.corruption import MAX_SHOWN_NAMES, REMOVE_HOST, name_ranks
from lockstep.parallel.engine import Engine, Predict, State, Update


@final
class KeptState:
    """Digests of the state of `engine` on this rank, taken after an update and compared in the next audited step.

    Every `every`-th step is audited, or no step if `every` is None. Call `update`, `evaluation` and `load` instead of
    the methods of the engine. Set `step` to the step in progress.
    """

    step: Step

    def __init__(self, engine: Engine, world: World, every: int | None) -> None:
        self._engine = engine
        self._world = world
        self._every = every
        self._digests = Digests()
        self._saved: Findings | None = None

    def begin(self) -> None:
        """Record digests of the state. Call this when the engine has initial weights or has loaded a checkpoint."""
        self._saved = None if self._every is None else self._findings()

    def note(self, step: Step) -> None:
        """Record digests of the state if the next step is audited. Call this after the update of `step`."""
        due = self._every is not None and is_due(step.number + 1, self._every)
        self._saved = self._findings() if due else None

    def update(self, lr: float, max_norm: float | None) -> Update:
        """See Engine."""
        update = self._engine.update(lr, max_norm)
        self.note(self.step)
        return update

    def evaluation(self) -> AbstractContextManager[Predict]:
        """See Engine."""
        self.forget()
        return self._engine.evaluation()

    def load(self, state: State) -> None:
        """See Engine."""
        self._engine.load(state)
        self.begin()

    def forget(self) -> None:
        """Discard the digests. Call this before an evaluation, which may change buffers of the model."""
        self._saved = None

    def check(self, step: Step) -> Findings:
        """Return digests of this rank's state. Call this at the start of an audited step, on all ranks.

        Raises CorruptionError on all ranks if the state of any rank has changed since its last update.
        """
        findings, saved = self._findings(), self._saved
        self._saved = None
        reports = self._world.all_gather_json(
            {"host": self._world.host, "changed": _changed(saved or findings, findings)}
        )
        if changed_ranks := [rank for rank, report in enumerate(reports) if report["changed"]]:
            kind, names, bit = reports[changed_ranks[0]]["changed"]
            label = f"{kind} ({list_some(names, MAX_SHOWN_NAMES)}{bit})"
            since = f"the update of step {step.number}" if step.number else "the start"
            raise CorruptionError(
                f"audit at step {step.number + 1}: {label} of {name_ranks(changed_ranks, reports)} changed after "
                f"{since}, although no code writes there. {REMOVE_HOST}",
                changed_ranks,
            )
        return findings

    def _findings(self) -> Findings:
        state = self._engine.state()
        return [
            *tensor_findings(self._digests, "the weights", state.model),
            *tensor_findings(self._digests, "the optimizer state", state.optimizer),
            (ComparedResult("the counters"), {name: short_hash(value) for name, value in state.scalars.items()}),
            *tensor_findings(self._digests, "the averaged weights", state.ema or {}),
        ]


def _changed(before: Findings, current: Findings) -> tuple[str, list[str], str] | None:
    """Return the kind of the first changed subject, the names that differ and the flipped bit, or None."""
    for (subject, old), (_, new) in zip(before, current, strict=True):
        if old != new:
            names = [name for name in new if old.get(name) != new[name]]
            return subject.kind, names, describe_flipped_bit(subject, names, old, new)
    return None
