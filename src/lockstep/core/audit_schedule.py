"""The micro-batches that are computed twice for an audit, and the ranks that repeat them.

Both depend only on the step number.
"""

from dataclasses import dataclass

from lockstep.core.mesh import Mesh
from lockstep.core.order import Step


@dataclass(frozen=True)
class AuditSchedule:
    """Every `every` steps, each rank repeats one micro-batch of a different rank. A single rank repeats its own.

    The pairs of ranks and the repeated micro-batches rotate from audit to audit.
    """

    every: int
    mesh: Mesh
    microbatches: int

    def due(self, step: Step) -> bool:
        """Whether micro-batches of `step` are repeated."""
        return is_due(step.number, self.every)

    def target(self, rank: int, step: Step) -> int:
        """Return the micro-batch of `rank` that is repeated. If the rank has none, it is the last one of the step."""
        leaves = min(self.microbatches, step.samples)
        own_indices = self.mesh.data_rank(rank).indices(leaves) or [(leaves - 1, True)]
        return own_indices[self._audit_index(step) // self._other_ranks % len(own_indices)][0]

    def assignment(self, rank: int, step: Step) -> int | None:
        """Return the micro-batch that `rank` repeats in `step`, or None if the step isn't audited."""
        if not self.due(step):
            return None
        distance = 1 + self._audit_index(step) % self._other_ranks
        return self.target((rank + distance) % self.mesh.size, step)

    def _audit_index(self, step: Step) -> int:
        return step.number // self.every

    @property
    def _other_ranks(self) -> int:
        return max(1, self.mesh.size - 1)


def is_due(number: int, every: int) -> bool:
    """Whether step `number` is audited. Steps are counted from 0."""
    return (number + 1) % every == 0
