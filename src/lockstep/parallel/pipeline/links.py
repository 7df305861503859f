"""The communication between stages: values, their gradients, and the gradients and new values of tied weights.

With S stages, each pair of neighboring stages uses two lines, and each tied weight uses one line:

| line | from | to | data |
|---|---|---|---|
| s | stage s - 1 | stage s | the generator states, then the values that cross the cut |
| S + s | stage s + 1 | stage s | gradients of these values |
| 2 S + t | borrower | owner | gradients of the tied weight t |
| 2 S + t | owner | borrower | new values of the tied weight t |
"""

from typing import final

import torch
from torch import Tensor

from lockstep.comm.p2p import PointToPoint, Values
from lockstep.comm.world import World
from lockstep.parallel.pipeline.placement import StagePlace
from lockstep.parallel.pipeline.tied_weights import TiedWeight, TiedWeights


@final
class Links:
    """The lines between the stages of this rank, neighboring stages, and stages with tied weights."""

    def __init__(self, world: World, place: StagePlace, ties: TiedWeights) -> None:
        self._place = place
        self._ties = ties
        neighbors = {number + step for number in place.stages for step in (-1, 1)}
        neighbors |= {tie.owner for tie in ties.all if tie.borrower in place.stages}
        neighbors |= {tie.borrower for tie in ties.all if tie.owner in place.stages}
        self._p2p = PointToPoint(world, place.ranks_of(neighbors))
        self.finish = self._p2p.finish  # waits until sent tensors may be overwritten
        self._inbox: dict[tuple[int, int], Values] = {}  # values between stages of this rank, by line and micro-batch

    def gradient_line(self, stage: int) -> int:
        """Return the line on which `stage` receives gradients. The line on which it receives inputs is `stage`."""
        return self._place.last + 1 + stage

    def tied_weight_line(self, tie: TiedWeight) -> int:
        """Return the line for a tied weight."""
        return 2 * (self._place.last + 1) + tie.number

    def send(self, values: Values, line: int, stage: int, index: int) -> None:
        """Send values for a micro-batch to `stage`."""
        if stage in self._place.stages:
            self._inbox[line, index] = values
        else:
            self._p2p.send(values, self._place.rank_of(stage), line)

    def receive(self, line: int, stage: int, index: int) -> Values:
        """Receive the values that `stage` sent for a micro-batch."""
        if stage in self._place.stages:
            return self._inbox.pop((line, index))
        return self._p2p.receive(self._place.rank_of(stage), line)

    def share_outputs(self, outputs: Values) -> Values:
        """Return the outputs of the last stage on all ranks of a pipeline. Ranks forward them from last to first."""
        line, stages, previous = (
            self.gradient_line(self._place.last),
            self._place.stages,
            self._place.coordinate.pipe - 1,
        )
        if self._place.last not in stages:
            outputs = self._p2p.receive(self._place.rank_of(previous + 2), line)
        if previous >= 0:
            self._p2p.send(outputs, self._place.rank_of(previous), line)
        self._p2p.finish()
        return outputs

    @torch.no_grad()
    def send_tied_weights(self) -> None:
        """Send tied weights to the ranks that borrow them. All ranks must call this after weights change."""
        place = self._place
        crossing_ties = [tie for tie in self._ties.all if place.rank_of(tie.owner) != place.rank_of(tie.borrower)]
        for tie in crossing_ties:
            if tie.owner in place.stages:
                self._p2p.send([tie.tensor.detach()], place.rank_of(tie.borrower), self.tied_weight_line(tie))
        for tie in crossing_ties:
            if tie.borrower in place.stages:
                [value] = self._p2p.receive(place.rank_of(tie.owner), self.tied_weight_line(tie))
                assert isinstance(value, Tensor)
                tie.tensor.copy_(value)
        self._p2p.finish()
