"""What goes from stage to stage: values and their gradients, and what is known of tied weights.

With S stages each pair of stages beside each other has two lines, and each tied weight one:

| line | from | to | what |
|---|---|---|---|
| s | stage s - 1 | stage s | values that cross the cut, behind the states of the generators |
| S + s | stage s + 1 | stage s | their gradients |
| 2 S + t | borrower | owner | gradients of the tied weight t |
| 2 S + t | owner | borrower | its new values |
"""

from typing import final

import torch
from torch import Tensor

from lockstep.comm.p2p import PointToPoint, Values
from lockstep.comm.world import World
from lockstep.parallel.pipeline.place import StagePlace
from lockstep.parallel.pipeline.tied_weights import TiedWeight, TiedWeights


@final
class Links:
    """The lines of this rank's stages to those beside them, and to those with the same weights."""

    def __init__(self, world: World, place: StagePlace, ties: TiedWeights) -> None:
        self._place = place
        self._ties = ties
        linked = {number + step for number in place.own for step in (-1, 1)}
        linked |= {tie.owner for tie in ties.all if tie.borrower in place.own}
        linked |= {tie.borrower for tie in ties.all if tie.owner in place.own}
        self._post = PointToPoint(world, place.ranks_of(linked))
        self.finish = self._post.finish  # waits until what was sent may be written to
        self._inbox: dict[tuple[int, int], Values] = {}  # by line and micro-batch, what stays on this rank

    def gradients_of(self, stage: int) -> int:
        """Return the line on which gradients come to `stage`; that of the forward has the stage's own number."""
        return self._place.last + 1 + stage

    def of_tie(self, tie: TiedWeight) -> int:
        """Return the line of a tied weight."""
        return 2 * (self._place.last + 1) + tie.number

    def send(self, values: Values, line: int, stage: int, index: int) -> None:
        """Give values for a micro-batch to `stage`, on its rank."""
        if stage in self._place.own:
            self._inbox[line, index] = values
        else:
            self._post.send(values, self._place.rank_of(stage), line)

    def receive(self, line: int, stage: int, index: int) -> Values:
        """Return what `stage` gave for a micro-batch."""
        if stage in self._place.own:
            return self._inbox.pop((line, index))
        return self._post.receive(self._place.rank_of(stage), line)

    def share_outputs(self, outputs: Values) -> Values:
        """Return what the last stage gives, on all ranks of the pipeline: it goes from rank to rank, the last first."""
        line, own, before = self.gradients_of(self._place.last), self._place.own, self._place.at.pipe - 1
        if self._place.last not in own:
            outputs = self._post.receive(self._place.rank_of(before + 2), line)
        if before >= 0:
            self._post.send(outputs, self._place.rank_of(before), line)
        self._post.finish()
        return outputs

    @torch.no_grad()
    def send_tied_weights(self) -> None:
        """Bring tied weights to the ranks that have borrowed them. All ranks call it after each change of weights."""
        place = self._place
        between = [tie for tie in self._ties.all if place.rank_of(tie.owner) != place.rank_of(tie.borrower)]
        for tie in between:
            if tie.owner in place.own:
                self._post.send([tie.tensor.detach()], place.rank_of(tie.borrower), self.of_tie(tie))
        for tie in between:
            if tie.borrower in place.own:
                [value] = self._post.receive(place.rank_of(tie.owner), self.of_tie(tie))
                assert isinstance(value, Tensor)
                tie.tensor.copy_(value)
        self._post.finish()
