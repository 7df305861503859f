"""Finds what changed on a rank between two steps, when nothing may.

Rows that only one rank holds can be compared with no other's. But from the end of an update to the next step nobody
writes weights, nor the optimizer's state: where their digests differ, the rank's memory is at fault, whoever else
holds the same.
"""

from contextlib import AbstractContextManager
from typing import final

from lockstep.comm.world import World
from lockstep.common.patterns import list_some
from lockstep.core.audit_schedule import is_due
from lockstep.core.digest import Digests
from lockstep.core.order import Step
from lockstep.errors import CorruptionError
from lockstep.parallel.audit_digests import Findings, Subject, hash_of, tensor_findings, which_bit
from lockstep.parallel.corruption import SHOWN, TAKE_OUT, name_ranks
from lockstep.parallel.engine import Engine, Predict, State, Update


@final
class KeptState:
    """What this rank of `engine` keeps from the step before one that is audited: each `every`-th, or none.

    `update`, `evaluation` and `load` are the engine's; `step` is the one under way.
    """

    step: Step

    def __init__(self, engine: Engine, world: World, every: int | None) -> None:
        self._engine = engine
        self._world = world
        self._every = every
        self._digests = Digests()
        self._before: Findings | None = None

    def begin(self) -> None:
        """Call when the engine has its first weights, or those of a checkpoint: keep digests of them."""
        self._before = None if self._every is None else self._findings()

    def note(self, step: Step) -> None:
        """Call after the update of `step`: keep digests of what it left, where the next step is audited."""
        due = self._every is not None and is_due(step.number + 1, self._every)
        self._before = self._findings() if due else None

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
        """Call before an evaluation, which may move buffers of the model."""
        self._before = None

    def check(self, step: Step) -> Findings:
        """Return what this rank keeps, at the start of an audited step. All ranks call it.

        Raises CorruptionError on all ranks where one of them does not keep what its last update left.
        """
        findings, before = self._findings(), self._before
        self._before = None
        told = self._world.told_by_all({"host": self._world.host, "changed": _changed(before or findings, findings)})
        if odd := [rank for rank, each in enumerate(told) if each["changed"]]:
            kind, names, bit = told[odd[0]]["changed"]
            what = f"{kind} ({list_some(names, SHOWN)}{bit})"
            since = f"the update of step {step.number}" if step.number else "the start"
            raise CorruptionError(
                f"audit at step {step.number + 1}: {what} of {name_ranks(odd, told)} changed "
                f"after {since}, when nothing writes there. {TAKE_OUT}",
                odd,
            )
        return findings

    def _findings(self) -> Findings:
        state = self._engine.state()
        return [
            *tensor_findings(self._digests, "the weights", state.model),
            *tensor_findings(self._digests, "the optimizer's state", state.optimizer),
            (Subject("the counters"), {name: hash_of(value) for name, value in state.scalars.items()}),
            *tensor_findings(self._digests, "the averaged weights", state.ema or {}),
        ]


def _changed(before: Findings, now: Findings) -> tuple[str, list[str], str] | None:
    """Return the first subject that is not as it was, the names of what differs in it, and the bit."""
    for (subject, old), (_, new) in zip(before, now, strict=True):
        if old != new:
            names = [name for name in new if old.get(name) != new[name]]
            return subject.kind, names, which_bit(subject, names, old, new)
    return None
