"""Model slices: the chunks of a model that a rank holds, and their locations in the full model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self, final

import torch
from torch import Size, Tensor, nn

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.order import get_subrange
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.core.work import find_divisors
from lockstep.errors import UsageError
from lockstep.parallel.layouts.base import (
    GathersWeights,
    GradientSum,
    HasRowSpans,
    Layout,
    MakeLayout,
    RowSpan,
    make_sharded_norms,
)
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.experts import Experts
from lockstep.parallel.tensor.layers import ColumnLinear, RowLinear
from lockstep.parallel.tensor.vocab import ChunkedHead, ChunkedLookup
from lockstep.tasks.base import ModelFactory


class SplitLayer(NamedTuple):
    """A layer that is split into chunks. `parameters` are the names of its split parameters.

    `num_rows` is the number of rows of the full parameters. If it is None, all chunks have the same number of rows.
    """

    module: nn.Module
    region: Region
    parameters: tuple[str, ...]
    num_rows: int | None = None


class RowLocation(NamedTuple):
    """The location of a rank's rows in a full parameter of shape `shape`.

    `rows_by_rank` contains the range of rows of each rank along the tensor axis. `rank` is the index of this rank.
    """

    shape: Size
    rows_by_rank: Sequence[range]
    rank: int

    @property
    def first_row(self) -> int:
        """The first row of this rank."""
        return self.rows_by_rank[self.rank].start


class SliceHolder(NamedTuple):
    """A rank of the world: its position along the tensor axis, and whether it is the primary rank for its chunks.

    Among the ranks with the same chunks, only the primary rank reports them.
    """

    position: int
    primary: bool


def find_split_layers(model: nn.Module) -> dict[str, SplitLayer]:
    """Return the layers that are split into chunks, by name."""
    split_layers = {}
    for name, module in model.named_modules():
        parameter_names = tuple(key for key, _ in module.named_parameters(recurse=False))
        forward = vars(module).get("forward")
        if isinstance(module, ColumnLinear):
            split_layers[name] = SplitLayer(module, module.region, parameter_names)
        elif isinstance(module, RowLinear):
            split_layers[name] = SplitLayer(module, module.region, ("weight",))
        elif isinstance(forward, Experts):
            split_layers[name] = SplitLayer(module, forward.region, parameter_names)
        elif isinstance(forward, ChunkedLookup | ChunkedHead):
            split_layers[name] = SplitLayer(module, forward.region, parameter_names, forward.num_rows)
    return split_layers


def locate_rows(
    model: nn.Module, layers: Mapping[str, SplitLayer], rank: int, num_ranks: int
) -> dict[str, RowLocation]:
    """Return the location of each split parameter on rank `rank` of `num_ranks`, under each of its names."""
    locations = {}
    for layer in layers.values():
        for key in layer.parameters:
            parameter = getattr(layer.module, key)
            rows = layer.num_rows or len(parameter) * num_ranks
            ranges = [_get_rows_of_rank(rows, layer, other, num_ranks) for other in range(num_ranks)]
            locations[parameter] = RowLocation(Size([rows, *parameter.shape[1:]]), ranges, rank)
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name: locations[parameter] for name, parameter in named_parameters if parameter in locations}


def check_distributable(layers: Mapping[str, SplitLayer], num_ranks: int, strategy: str = "tensor") -> None:
    """Raise UsageError if the chunks of these layers can't be evenly distributed over `num_ranks` ranks."""
    if not layers and num_ranks > 1:
        raise UsageError(
            f"strategy {strategy}: recipe.model.chunks is 1, so there is nothing to share; set it to a multiple of "
            f"{num_ranks}, which changes the weights, or use a different strategy"
        )
    for name, layer in layers.items():
        count = layer.region.num_chunks
        if count % num_ranks:
            options = ", ".join(map(str, find_divisors(count)))
            raise UsageError(
                f"strategy {strategy}: {num_ranks} processes cannot share the {count} chunks of {name}; use {options}"
            )


def keep_local_chunks(model: nn.Module, world: World, mesh: Mesh) -> nn.Module:
    """Discard the chunks of other ranks along the tensor axis, in place. All ranks must call this function.

    Returns the model.
    """
    rank = mesh.get_coordinates(world.rank).tensor
    tensor_sum = world.make_canonical_sum(mesh, "tensor", side_stream=False)
    layers = find_split_layers(model)
    check_distributable(layers, mesh.tensor)
    keep_rows_of_rank(layers.values(), rank, mesh.tensor)
    for region in {id(layer.region): layer.region for layer in layers.values()}.values():
        region.distribute(rank, mesh.tensor, tensor_sum)
    return model


def keep_rows_of_rank(layers: Iterable[SplitLayer], rank: int, num_ranks: int) -> None:
    """Discard the rows of split parameters that don't belong to rank `rank` of `num_ranks`, in place."""
    kept_parameters: dict[nn.Parameter, nn.Parameter] = {}  # by full parameter, so that tied weights stay tied
    for layer in layers:
        for key in layer.parameters:
            parameter = getattr(layer.module, key)
            if parameter not in kept_parameters:
                rows = _get_rows_of_rank(len(parameter), layer, rank, num_ranks)
                data = parameter.detach()[rows.start : rows.stop].clone()
                kept_parameters[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            setattr(layer.module, key, kept_parameters[parameter])


def _get_rows_of_rank(num_rows: int, layer: SplitLayer, rank: int, num_ranks: int) -> range:
    """Return the range of rows that rank `rank` of `num_ranks` holds, out of `num_rows` rows."""
    count = layer.region.num_chunks
    chunk_indices = get_subrange(count, num_ranks, rank)
    return range(
        get_subrange(num_rows, count, chunk_indices[0]).start, get_subrange(num_rows, count, chunk_indices[-1]).stop
    )


def build_slice(build: ModelFactory, world: World, mesh: Mesh) -> nn.Module:
    """Build a model, and discard the chunks of other ranks. All ranks must call this function."""
    return keep_local_chunks(build(), world, mesh)


def make_slice_layout(world: World, mesh: Mesh, make_layout: MakeLayout) -> MakeLayout:
    """Wrap `make_layout`, so that this rank reports its slice's tensors as rows of the full model."""

    def make_sliced_layout(
        model: nn.Module, stream: CommStream, dtype: torch.dtype | None
    ) -> tuple[Layout, GradientSum]:
        model_slice = ModelSlice.for_rank(model, world, mesh)
        layout, gradients = make_layout(model, stream, dtype)
        return SlicedLayout(world, model_slice, layout), gradients

    return make_sliced_layout


@final
class ModelSlice:
    """The part of a model on one rank: its rows of the split parameters, and all replicated tensors."""

    def __init__(self, locations: Mapping[str, RowLocation], holders: Sequence[SliceHolder], rank: int) -> None:
        """Create the slice of rank `rank` of the world. `holders` lists all ranks of the world.

        `locations` contains the location of this rank's rows of each split parameter, by name.
        """
        self.reports_replicated = not holders[rank].position  # whether this rank reports the replicated tensors
        self.primary = holders[rank].primary
        self._locations = locations
        self._holders = holders

    @classmethod
    def for_rank(cls, model: nn.Module, world: World, mesh: Mesh) -> Self:
        """Return this rank's slice along the tensor axis of the mesh."""
        coordinates = [mesh.get_coordinates(rank) for rank in range(world.size)]
        holders = [SliceHolder(each.tensor, not (each.replicate or each.context)) for each in coordinates]
        position = holders[world.rank].position
        return cls(locate_rows(model, find_split_layers(model), position, mesh.tensor), holders, world.rank)

    def as_full_shard(self, name: str, tensor: MaybeSharded) -> MaybeSharded:
        """Return a tensor of the slice as a shard of the full tensor. Replicated tensors are returned unchanged."""
        if isinstance(tensor, Shard):
            return self.convert_shard(name, tensor)
        return (
            self.convert_shard(name, Shard(tensor.detach(), 0, tensor.shape, self.primary))
            if name in self._locations
            else tensor
        )

    def convert_shard(self, name: str, shard: Shard) -> Shard:
        """Convert a shard of a slice's tensor to a shard of the full tensor."""
        if name not in self._locations:
            return replace(shard, primary=shard.primary and self.reports_replicated)
        location = self._locations[name]
        return replace(shard, first=location.first_row + shard.first, shape=location.shape)

    def get_row_spans(self, name: str, shape: Size, layout: Layout) -> Sequence[RowSpan]:
        """Return the rows of a full parameter on each rank, or () if the parameter is neither split nor sharded.

        `layout` is the layout of each rank's slice.
        """
        inner = layout if isinstance(layout, HasRowSpans) else None
        if name not in self._locations:
            spans = [] if inner is None else inner.spans(name, shape)
            return [span._replace(primary=span.primary and not self._holders[span.rank].position) for span in spans]
        spans = []
        for rank, holder in enumerate(self._holders):
            rows = self._locations[name].rows_by_rank[holder.position]
            span = RowSpan(rank, 0, len(rows), holder.primary)
            if inner is not None:
                span = inner.spans(name, Size([len(rows), *shape[1:]]))[rank]
            spans.append(span._replace(first=rows.start + span.first))
        return spans


@final
class SlicedLayout:
    """Wraps the layout of a rank's slice, and reports its tensors as rows of the full model."""

    def __init__(self, world: World, model_slice: ModelSlice, layout: Layout) -> None:
        self._slice = model_slice
        self._layout = layout
        self.trained = layout.trained
        self.collect, self.publish, self.reload = layout.collect, layout.publish, layout.reload
        self.norms = make_sharded_norms(world, {tensor: self._to_shard(name, tensor) for name, tensor in self.trained})

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        return {name: self._slice.as_full_shard(name, tensor) for name, tensor in self._layout.state().items()}

    def spans(self, name: str, shape: Size) -> Sequence[RowSpan]:
        """See HasRowSpans."""
        return self._slice.get_row_spans(name, shape, self._layout)

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """See GathersWeights. Returns {} if the layout of the slice doesn't shard parameters."""
        return self._layout.gathered_shards() if isinstance(self._layout, GathersWeights) else {}

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return self._slice.as_full_shard(name, self._layout.as_shard(name, tensor))

    def _to_shard(self, name: str, tensor: Tensor) -> Shard:
        """Return a trained tensor as a Shard of the slice, with `primary` set if this rank reports it."""
        shard = self.as_shard(name, tensor)
        primary = self._slice.primary and self._slice.reports_replicated
        return shard if isinstance(shard, Shard) else Shard(shard, 0, shard.shape, primary)
