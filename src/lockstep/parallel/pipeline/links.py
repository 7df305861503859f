"""Communication between stages: values, their gradients, and the gradients and new values of tied weights.

Messages are sent on numbered channels (comm/p2p.py). With S stages, each pair of neighboring stages uses two channels,
and each tied weight uses one channel:

| channel | from | to | data |
|---|---|---|---|
| s | stage s - 1 | stage s | the RNG states, then the outgoing values of stage s - 1 |
| S + s | stage s + 1 | stage s | gradients of these values |
| 2 S + t | borrower | owner | gradients of the tied weight t |
| 2 S + t | owner | borrower | new values of the tied weight t |
"""

from typing import final

import torch
from torch import Tensor

from lockstep.comm.p2p import PointToPoint, Values
from lockstep.comm.world import World
from lockstep.parallel.pipeline.placement import StagePlacement
from lockstep.parallel.pipeline.tied_weights import TiedWeight, TiedWeights


@final
class Links:
    """Sends and receives values between this rank's stages, their neighbors, and stages that share tied weights."""

    def __init__(self, world: World, placement: StagePlacement, ties: TiedWeights) -> None:
        self._placement = placement
        self._ties = ties
        neighbors = {number + step for number in placement.stages for step in (-1, 1)}
        neighbors |= {tie.owner for tie in ties.all if tie.borrower in placement.stages}
        neighbors |= {tie.borrower for tie in ties.all if tie.owner in placement.stages}
        self._p2p = PointToPoint(world, placement.get_peer_ranks(neighbors))
        self.finish = self._p2p.finish  # waits until sent tensors can be overwritten
        self._inbox: dict[tuple[int, int], Values] = {}  # messages between stages of this rank, by channel and index

    def get_gradient_channel(self, stage: int) -> int:
        """Return the channel on which `stage` receives the gradients of its outputs.

        Channel `stage` is for its inputs.
        """
        return self._placement.last_stage + 1 + stage

    def get_tied_weight_channel(self, tie: TiedWeight) -> int:
        """Return the channel for the gradients and the new values of a tied weight."""
        return 2 * (self._placement.last_stage + 1) + tie.number

    def send(self, values: Values, channel: int, stage: int, microbatch_index: int) -> None:
        """Send values of micro-batch `microbatch_index` to `stage`."""
        if stage in self._placement.stages:
            self._inbox[channel, microbatch_index] = values
        else:
            self._p2p.send(values, self._placement.get_rank(stage), channel)

    def receive(self, channel: int, stage: int, microbatch_index: int) -> Values:
        """Receive values of micro-batch `microbatch_index` from `stage`."""
        if stage in self._placement.stages:
            return self._inbox.pop((channel, microbatch_index))
        return self._p2p.receive(self._placement.get_rank(stage), channel)

    def share_outputs(self, outputs: Values) -> Values:
        """Return the last stage's outputs on all ranks of the pipeline, by passing them back from rank to rank."""
        channel, stages, previous = (
            self.get_gradient_channel(self._placement.last_stage),
            self._placement.stages,
            self._placement.coordinate.pipe - 1,
        )
        if self._placement.last_stage not in stages:
            outputs = self._p2p.receive(self._placement.get_rank(previous + 2), channel)
        if previous >= 0:
            self._p2p.send(outputs, self._placement.get_rank(previous), channel)
        self._p2p.finish()
        return outputs

    @torch.no_grad()
    def send_tied_weights(self) -> None:
        """Send tied weights to the ranks that borrow them. All ranks must call this after the weights change."""
        placement = self._placement
        crossing_ties = [
            tie for tie in self._ties.all if placement.get_rank(tie.owner) != placement.get_rank(tie.borrower)
        ]
        for tie in crossing_ties:
            if tie.owner in placement.stages:
                self._p2p.send(
                    [tie.tensor.detach()], placement.get_rank(tie.borrower), self.get_tied_weight_channel(tie)
                )
        for tie in crossing_ties:
            if tie.borrower in placement.stages:
                [value] = self._p2p.receive(placement.get_rank(tie.owner), self.get_tied_weight_channel(tie))
                assert isinstance(value, Tensor)
                tie.tensor.copy_(value)
        self._p2p.finish()
