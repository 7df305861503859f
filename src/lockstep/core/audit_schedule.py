"""The schedule of recomputation audits: which ranks recompute which micro-batches, and when.

The schedule depends only on the step number, the mesh and the number of micro-batches.
"""

from dataclasses import dataclass

from lockstep.core.mesh import Mesh
from lockstep.core.order import Step


@dataclass(frozen=True)
class AuditSchedule:
    """Determines the micro-batch that each rank recomputes in an audit.

    There is an audit every `interval` steps. Each rank recomputes one micro-batch of a different rank. A single rank
    recomputes one of its own micro-batches. The pairs of ranks and the micro-batches rotate from audit to audit.
    """

    interval: int
    mesh: Mesh
    num_microbatches: int

    def is_due(self, step: Step) -> bool:
        """Return whether `step` is audited."""
        return is_due(step.number, self.interval)

    def get_audited_microbatch(self, rank: int, step: Step) -> int:
        """Return which micro-batch of `rank` is recomputed, or the step's last micro-batch if `rank` has none."""
        leaves = min(self.num_microbatches, step.samples)
        own_indices = self.mesh.get_data_rank(rank).get_microbatches(leaves) or [(leaves - 1, True)]
        return own_indices[self._get_audit_index(step) // self._peer_count % len(own_indices)][0]

    def get_assignment(self, rank: int, step: Step) -> int | None:
        """Return the micro-batch that `rank` recomputes in `step`, or None if the step isn't audited."""
        if not self.is_due(step):
            return None
        distance = 1 + self._get_audit_index(step) % self._peer_count
        return self.get_audited_microbatch((rank + distance) % self.mesh.size, step)

    def _get_audit_index(self, step: Step) -> int:
        return step.number // self.interval

    @property
    def _peer_count(self) -> int:
        return max(1, self.mesh.size - 1)


def is_due(step_number: int, interval: int) -> bool:
    """Return whether step `step_number` is audited. Steps are counted from 0."""
    return (step_number + 1) % interval == 0
