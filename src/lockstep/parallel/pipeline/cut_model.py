"""A model that is followed while it is whole, and the code of its stages once a rank has its own tensors alone."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn

from lockstep.core.batch import Inputs
from lockstep.parallel.pipeline.call_trace import MetaModel
from lockstep.parallel.pipeline.cut import line_of, ownership, replay_parts, stage_module
from lockstep.parallel.pipeline.graph_trace import PipelineCut
from lockstep.parallel.pipeline.place import StagePlace
from lockstep.parallel.pipeline.replay import Replay

# Given what enters a stage, of the first one the tensors of the inputs, and the inputs; returns what leaves it, or the
# tensors of the outputs.
StageForward = Callable[[Sequence[Any], Inputs], Sequence[Any]]


class StageCode(NamedTuple):
    """What computes a stage in both modes, and the module that has its parameters while it trains."""

    training: StageForward
    evaluating: StageForward
    module: nn.Module


@final
class CutModel:
    """Make it while `model` is whole; `code` may be asked for later. `outputs` has the form of the model's."""

    def __init__(self, model: nn.Module, cut: PipelineCut, place: StagePlace, device: torch.device) -> None:
        self._model = model
        self._cut = cut
        self._place = place
        self.owner, self.borrower = ownership(model, cut)
        # The names of what this rank's stages own, and of what they borrow.
        self.own, self.borrowed = (
            {name for name, stage in of.items() if stage in place.own} for of in (self.owner, self.borrower)
        )
        self._meta = MetaModel(model, device) if cut.replayed else None
        self._parts = [replay_parts(model, cut, training) for training in (True, False) if cut.replayed]
        self.outputs = line_of(model, cut, training=False).outputs
        model.train()  # following it has put it into its own mode

    def names_of(self, stage: int) -> set[str]:
        """Return the names of what a stage owns."""
        return {name for name, owner in self.owner.items() if owner == stage}

    def code(self, held: Collection[str]) -> dict[int, StageCode]:
        """Return the code of this rank's stages, where the tensors `held` have values. Call it once."""
        model, cut = self._model, self._cut
        if self._meta is None:
            found = {}
            for number in self._place.own:
                evaluating, training = (stage_module(model.train(mode), cut, number) for mode in (False, True))
                found[number] = StageCode(_with_inputs(training), _with_inputs(evaluating), training)
            return found
        replay = Replay(model, self._meta, cut, held)
        of_training, of_evaluation = self._parts
        return {
            number: StageCode(replay.stage(of_training[number]), replay.stage(of_evaluation[number]), model)
            for number in self._place.own
        }


def _with_inputs(module: nn.Module) -> StageForward:
    def forward(values: Sequence[Any], inputs: Inputs) -> Sequence[Any]:
        outputs: Sequence[Any] = module(*values)
        return outputs

    return forward
