"""Which micro-batches of a step are computed twice, and by whom: functions of the step's number alone."""

from dataclasses import dataclass

from lockstep.core.mesh import Mesh
from lockstep.core.order import Step


@dataclass(frozen=True)
class AuditSchedule:
    """Every `every` steps each rank repeats one micro-batch of another rank, or of its own where it is alone.

    Who repeats whose, and which one, takes turns.
    """

    every: int
    mesh: Mesh
    microbatches: int

    def due(self, step: Step) -> bool:
        """Whether micro-batches of `step` are repeated."""
        return is_due(step.number, self.every)

    def target(self, rank: int, step: Step) -> int:
        """Return which micro-batch of `rank` is repeated; the step's last one where it has none of its own."""
        leaves = min(self.microbatches, step.samples)
        own = self.mesh.data_rank(rank).indices(leaves) or [(leaves - 1, True)]
        return own[self._turn(step) // self._others % len(own)][0]

    def assignment(self, rank: int, step: Step) -> int | None:
        """Return which micro-batch `rank` repeats in `step`, if any is due."""
        if not self.due(step):
            return None
        distance = 1 + self._turn(step) % self._others
        return self.target((rank + distance) % self.mesh.size, step)

    def _turn(self, step: Step) -> int:
        return step.number // self.every

    @property
    def _others(self) -> int:
        return max(1, self.mesh.size - 1)


def is_due(number: int, every: int) -> bool:
    """Whether the step of that number, from 0, is audited."""
    return (number + 1) % every == 0
