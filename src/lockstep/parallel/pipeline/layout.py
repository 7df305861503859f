"""The layout of a pipeline: each rank updates the parameters of its stages, or some rows of these parameters.

Ranks with the same stages of different pipelines can shard the optimizer state by rows, as in ZeRO stage 1
(parallel/layouts/rows.py). Norms, such as the norm for gradient clipping, cover the stages of all ranks.
"""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.parallel.layouts.base import Layout, NormFunctions, get_trainable_parameters, make_sharded_norms
from lockstep.parallel.layouts.rows import RowLayout
from lockstep.parallel.optimizer_step import get_gradient
from lockstep.parallel.pipeline.part import make_empty_shard
from lockstep.parallel.pipeline.placement import StagePlacement
from lockstep.parallel.tensor.slices import ModelSlice
from lockstep.parallel.weights import ReplicatedLayout


@final
class StageLayout:
    """The layout of `local_module`, the part of `model` on this rank.

    All other tensors of the model are on the meta device. `placement` contains the stages of this rank, and `own_slice`
    is this rank's tensor-parallel slice of these stages. All ranks must create this object at the same time.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        local_module: nn.Module,
        placement: StagePlacement,
        dtype: torch.dtype | None,
        own_slice: ModelSlice,
    ) -> None:
        self._placement = placement
        self._slice = own_slice
        self._all = get_trainable_parameters(model)
        # Record the dtypes of the weights now, because borrowed weights are later converted to the compute dtype.
        self._absent = {
            name: own_slice.convert_shard(name, make_empty_shard(tensor)) for name, tensor in model.state_dict().items()
        }
        sharers = world.split(placement.sharing_groups)
        is_alone = sharers.size == 1
        self._rank_layout: Layout = (
            ReplicatedLayout(local_module, dtype)
            if is_alone
            else RowLayout(local_module, sharers, offload=False, dtype=dtype)
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
        all_norms = make_sharded_norms(world, dict(zip(keys, self._parts, strict=True)), trained.values())
        stage_shards: dict[Tensor, Shard] = {tensor: self.as_shard(name, tensor) for name, tensor in self.trained}
        stage_norms = self._rank_layout.norms.compute_norms
        if placement.mesh.tensor > 1:  # other ranks hold different slices of the same stages
            slice_world = world.split(placement.mesh.get_groups("replicate", "tensor", "context"))
            stage_norms = make_sharded_norms(slice_world, stage_shards).compute_norms
        self.norms = NormFunctions(all_norms.compute_row_norms, stage_norms, all_norms.sync_flags_)

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        held = self._rank_layout.state()
        return {
            name: self._to_full_shard(name, held[name]) if name in held else absent_shard
            for name, absent_shard in self._absent.items()
        }

    def local_state(self) -> dict[str, MaybeSharded]:
        """Return this rank's parameters and buffers. Slices and rows are returned as shards of the full tensors."""
        return {name: self._slice.as_full_shard(name, value) for name, value in self._rank_layout.state().items()}

    def as_shard(self, name: str, tensor: Tensor) -> Shard:
        """See Layout."""
        return self._to_full_shard(name, self._rank_layout.as_shard(name, tensor.detach()))

    def gradient_shards(self) -> dict[str, MaybeSharded]:
        """Return the gradient of each parameter of the model as a shard. Shards of other ranks' stages are empty."""
        gradients = {name: self.as_shard(name, get_gradient(tensor)) for name, tensor in self.trained}
        return {name: gradients.get(name, part) for (name, _), part in zip(self._all, self._parts, strict=True)}

    def _to_full_shard(self, name: str, value: MaybeSharded) -> Shard:
        if isinstance(value, Shard):
            part = replace(value, primary=value.primary and self._placement.rows_primary)
        else:
            part = Shard(value, 0, value.shape, self._placement.whole_primary)
        return self._slice.convert_shard(name, part)
