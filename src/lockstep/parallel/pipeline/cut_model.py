"""Builds the code of pipeline stages from a model that is analyzed before its tensors are discarded."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn

from lockstep.core.batch import Inputs
from lockstep.parallel.pipeline.call_trace import MetaModel
from lockstep.parallel.pipeline.cut import build_stage_module, find_owners, make_replay_stages, trace_forward
from lockstep.parallel.pipeline.graph_trace import PipelineCut
from lockstep.parallel.pipeline.placement import StagePlacement
from lockstep.parallel.pipeline.replay import Replay

# Runs a stage on its incoming values (for the first stage, the tensors of the model inputs) and the model inputs.
# Returns the outgoing values (for the last stage, the tensors of the model outputs).
StageForward = Callable[[Sequence[Any], Inputs], Sequence[Any]]


class StageCode(NamedTuple):
    """The functions that run a stage in training and in evaluation, and the module with the stage's parameters."""

    training: StageForward
    evaluation: StageForward
    module: nn.Module


@final
class PartitionedModel:
    """A model that is partitioned into stages.

    Create this object while `model` still has all of its tensors. Then discard the tensors of other ranks, and call
    `build_code`. `outputs` has the structure of the model outputs.
    """

    def __init__(self, model: nn.Module, cut: PipelineCut, placement: StagePlacement, device: torch.device) -> None:
        self._model = model
        self._cut = cut
        self._placement = placement
        self.owner, self.borrower = find_owners(model, cut)
        # The names of the tensors that this rank's stages own, and of the tensors that they borrow.
        self.owned_names, self.borrowed_names = (
            {name for name, stage in stage_by_name.items() if stage in placement.stages}
            for stage_by_name in (self.owner, self.borrower)
        )
        self._meta = MetaModel(model, device) if cut.replayed else None
        self._parts = [make_replay_stages(model, cut, training) for training in (True, False) if cut.replayed]
        self.outputs = trace_forward(model, cut, training=False).outputs
        model.train()  # tracing leaves the model in evaluation mode

    def get_owned_names(self, stage: int) -> set[str]:
        """Return the names of the tensors that `stage` owns."""
        return {name for name, owner in self.owner.items() if owner == stage}

    def build_code(self, names: Collection[str]) -> dict[int, StageCode]:
        """Return the code of each of this rank's stages, by stage number.

        The tensors `names` must have values on this rank. Call this method only once.
        """
        model, cut = self._model, self._cut
        if self._meta is None:
            code_by_stage = {}
            for number in self._placement.stages:
                evaluation, training = (build_stage_module(model.train(mode), cut, number) for mode in (False, True))
                code_by_stage[number] = StageCode(
                    _make_stage_forward(training), _make_stage_forward(evaluation), training
                )
            return code_by_stage
        replay = Replay(model, self._meta, cut, names)
        training_parts, evaluation_parts = self._parts
        return {
            number: StageCode(
                replay.make_stage(training_parts[number]), replay.make_stage(evaluation_parts[number]), model
            )
            for number in self._placement.stages
        }


def _make_stage_forward(module: nn.Module) -> StageForward:
    def run_stage(values: Sequence[Any], inputs: Inputs) -> Sequence[Any]:
        outputs: Sequence[Any] = module(*values)
        return outputs

    return run_stage
