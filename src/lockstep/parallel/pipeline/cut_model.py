"""Analyzes a model before it is split, and returns the code of its stages after a rank keeps only its own tensors."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn

from lockstep.core.batch import Inputs
from lockstep.parallel.pipeline.call_trace import MetaModel
from lockstep.parallel.pipeline.cut import line_of, ownership, replay_parts, stage_module
from lockstep.parallel.pipeline.graph_trace import PipelineCut
from lockstep.parallel.pipeline.placement import StagePlace
from lockstep.parallel.pipeline.replay import Replay

# The arguments are the values that enter a stage (for the first stage, the tensors of the inputs) and the inputs of the
# model. Returns the values that leave the stage (for the last stage, the tensors of the outputs).
StageForward = Callable[[Sequence[Any], Inputs], Sequence[Any]]


class StageCode(NamedTuple):
    """The functions that compute a stage in training and in evaluation, and its module with parameters in training."""

    training: StageForward
    evaluating: StageForward
    module: nn.Module


@final
class CutModel:
    """A model and its cut. Create this object while `model` still has all tensors, and call `code` afterwards.

    `outputs` has the structure of the model's outputs.
    """

    def __init__(self, model: nn.Module, cut: PipelineCut, place: StagePlace, device: torch.device) -> None:
        self._model = model
        self._cut = cut
        self._place = place
        self.owner, self.borrower = ownership(model, cut)
        # The names of the tensors that the stages of this rank own, and of the tensors that they borrow.
        self.own, self.borrowed = (
            {name for name, stage in stage_by_name.items() if stage in place.stages}
            for stage_by_name in (self.owner, self.borrower)
        )
        self._meta = MetaModel(model, device) if cut.replayed else None
        self._parts = [replay_parts(model, cut, training) for training in (True, False) if cut.replayed]
        self.outputs = line_of(model, cut, training=False).outputs
        model.train()  # because the analysis has changed the mode

    def names_of(self, stage: int) -> set[str]:
        """Return the names of the tensors that a stage owns."""
        return {name for name, owner in self.owner.items() if owner == stage}

    def code(self, names: Collection[str]) -> dict[int, StageCode]:
        """Return the code of this rank's stages. The tensors `names` must have values. Call this only once."""
        model, cut = self._model, self._cut
        if self._meta is None:
            code_by_stage = {}
            for number in self._place.stages:
                evaluating, training = (stage_module(model.train(mode), cut, number) for mode in (False, True))
                code_by_stage[number] = StageCode(_with_inputs(training), _with_inputs(evaluating), training)
            return code_by_stage
        replay = Replay(model, self._meta, cut, names)
        training_parts, evaluation_parts = self._parts
        return {
            number: StageCode(replay.stage(training_parts[number]), replay.stage(evaluation_parts[number]), model)
            for number in self._place.stages
        }


def _with_inputs(module: nn.Module) -> StageForward:
    def forward(values: Sequence[Any], inputs: Inputs) -> Sequence[Any]:
        outputs: Sequence[Any] = module(*values)
        return outputs

    return forward
