"""The trained tensors on a rank of a pipeline: the parameters of its stages, or rows of these parameters.

Ranks with the same stages in parallel pipelines can shard the optimizer state by rows, as in ZeRO stage 1
(parallel/layouts/rows.py). The norms of a step cover the stages of all ranks.
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
from lockstep.parallel.pipeline.placement import StagePlace
from lockstep.parallel.tensor.slices import Slice
from lockstep.parallel.weights import Weights


@final
class StageLayout:
    """The layout of `part`, the part of `model` on this rank. All other tensors of the model are on the meta device.

    `stage_place` contains the stages of this rank, and `own_slice` this rank's slice of the stages. All ranks must
    create a layout at the same time.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        part: nn.Module,
        stage_place: StagePlace,
        dtype: torch.dtype | None,
        own_slice: Slice,
    ) -> None:
        self._stage_place = stage_place
        self._slice = own_slice
        self._all = trainable_parameters(model)
        # Created now with the dtypes of the weights, because borrowed weights are later converted to the compute dtype.
        self._absent = {name: own_slice.part(name, absent(tensor)) for name, tensor in model.state_dict().items()}
        sharers = world.among(stage_place.sharers)
        is_alone = sharers.size == 1
        self._rank_layout: Layout = (
            Weights(part, dtype) if is_alone else RowLayout(part, sharers, offload=False, dtype=dtype)
        )
        self.trained = self._rank_layout.trained
        self.collect, self.publish, self.reload = (
            self._rank_layout.collect,
            self._rank_layout.publish,
            self._rank_layout.reload,
        )
        trained = dict(self.trained)
        self._parts = [
            self.as_shard(name, trained[name]) if name in trained else self._absent[name] for name, _ in self._all
        ]
        keys: list[Tensor] = [trained.get(name, parameter) for name, parameter in self._all]
        all_norms = norms_of_rows(world, dict(zip(keys, self._parts, strict=True)), trained.values())
        stage_shards: dict[Tensor, Shard] = {tensor: self.as_shard(name, tensor) for name, tensor in self.trained}
        stage_norms = self._rank_layout.norms.of_tensors
        if stage_place.mesh.tensor > 1:  # other ranks hold different slices of the same stages
            slice_world = world.among(stage_place.mesh.groups("replicate", "tensor", "context"))
            stage_norms = norms_of_rows(slice_world, stage_shards).of_tensors
        self.norms = Norms(all_norms.all_rows, stage_norms, all_norms.agree_)

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        held = self._rank_layout.state()
        return {
            name: self._as_part(name, held[name]) if name in held else absent_shard
            for name, absent_shard in self._absent.items()
        }

    def own_state(self) -> dict[str, MaybeSharded]:
        """Return the part of the model state that is on this rank."""
        return {name: self._slice.as_part(name, value) for name, value in self._rank_layout.state().items()}

    def as_shard(self, name: str, tensor: Tensor) -> Shard:
        """See Layout."""
        return self._as_part(name, self._rank_layout.as_shard(name, tensor.detach()))

    def all_gradients(self) -> dict[str, MaybeSharded]:
        """Return the gradients of all parameters of the model as shards. Call this after a backward pass."""
        gradients = {name: self.as_shard(name, gradient(tensor)) for name, tensor in self.trained}
        return {name: gradients.get(name, part) for (name, _), part in zip(self._all, self._parts, strict=True)}

    def _as_part(self, name: str, value: MaybeSharded) -> Shard:
        if isinstance(value, Shard):
            part = replace(value, primary=value.primary and self._stage_place.rows_primary)
        else:
            part = Shard(value, 0, value.shape, self._stage_place.whole_primary)
        return self._slice.part(name, part)
