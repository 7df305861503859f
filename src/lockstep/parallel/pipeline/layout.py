"""The trained tensors on a rank of a pipeline: the parameters of its stages, or rows of these parameters.

Ranks with the same stages in parallel pipelines can shard the optimizer state by rows, as in stage 1 of ZeRO
(parallel/layouts/rows.py). The norms of a step are over the stages of all ranks.
"""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.parallel.layouts.base import Layout, Norms, norms_of_rows, trainable_parameters
from lockstep.parallel.layouts.rows import RowLayout
from lockstep.parallel.optimizer_step import gradient
from lockstep.parallel.pipeline.part import absent
from lockstep.parallel.pipeline.place import StagePlace
from lockstep.parallel.tensor.slices import Slice
from lockstep.parallel.weights import Weights


@final
class StageLayout:
    """The part of `model` on this rank, which is `part`. The other tensors have no memory here.

    `at` has the stages of this rank, and `place` its slice of them. All ranks must create a layout.
    """

    def __init__(
        self, world: World, model: nn.Module, part: nn.Module, at: StagePlace, dtype: torch.dtype | None, place: Slice
    ) -> None:
        self._at = at
        self._place = place
        self._all = trainable_parameters(model)
        # In the dtypes of the weights, because borrowed weights are later converted to the compute dtype.
        self._absent = {name: place.part(name, absent(each)) for name, each in model.state_dict().items()}
        sharers = world.among(at.sharers)
        alone = sharers.size == 1
        self._own: Layout = Weights(part, dtype) if alone else RowLayout(part, sharers, offload=False, dtype=dtype)
        self.trained = self._own.trained
        self.collect, self.publish, self.reload = self._own.collect, self._own.publish, self._own.reload
        own = dict(self.trained)
        self._parts = [self.as_shard(name, own[name]) if name in own else self._absent[name] for name, _ in self._all]
        keys: list[Tensor] = [own.get(name, parameter) for name, parameter in self._all]
        every = norms_of_rows(world, dict(zip(keys, self._parts, strict=True)), own.values())
        of_stages: dict[Tensor, Shard] = {each: self.as_shard(name, each) for name, each in self.trained}
        of_tensors = self._own.norms.of_tensors
        if at.mesh.tensor > 1:  # other ranks have different slices of the same stages
            beside = world.among(at.mesh.groups("replicate", "tensor", "context"))
            of_tensors = norms_of_rows(beside, of_stages).of_tensors
        self.norms = Norms(every.all_rows, of_tensors, every.agree_)

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        own = self._own.state()
        return {
            name: self._as_part(name, own[name]) if name in own else elsewhere
            for name, elsewhere in self._absent.items()
        }

    def own_state(self) -> dict[str, MaybeSharded]:
        """Return the part of the state that is on this rank."""
        return {name: self._place.as_part(name, held) for name, held in self._own.state().items()}

    def as_shard(self, name: str, tensor: Tensor) -> Shard:
        """See Layout."""
        return self._as_part(name, self._own.as_shard(name, tensor.detach()))

    def all_gradients(self) -> dict[str, MaybeSharded]:
        """Return the gradients of all parameters of the model, between a backward and an update, as shards."""
        own = {name: self.as_shard(name, gradient(tensor)) for name, tensor in self.trained}
        return {name: own.get(name, part) for (name, _), part in zip(self._all, self._parts, strict=True)}

    def _as_part(self, name: str, held: MaybeSharded) -> Shard:
        if isinstance(held, Shard):
            part = replace(held, primary=held.primary and self._at.rows_primary)
        else:
            part = Shard(held, 0, held.shape, self._at.whole_primary)
        return self._place.part(name, part)
