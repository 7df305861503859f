"""Model slices: the chunks of a model on this rank, and their location in the full model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, Self, final

import torch
from torch import Size, Tensor, nn

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.order import part
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.core.work import divisors
from lockstep.errors import UsageError
from lockstep.parallel.layouts.base import GathersWeights, GradientSum, Layout, MakeLayout, norms_of_rows
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.experts import Experts
from lockstep.parallel.tensor.layers import ColumnLinear, RowLinear
from lockstep.parallel.tensor.vocab import Head, LookUp
from lockstep.tasks.base import Build


class CutLayer(NamedTuple):
    """A layer that is split into chunks, with the names of its parameters that are split.

    If chunks can have different numbers of rows, `rows` is the number of rows of the full parameters.
    """

    module: nn.Module
    chunks: Region
    parameters: tuple[str, ...]
    rows: int | None = None


class RowPlace(NamedTuple):
    """The location of a rank's rows in a full parameter of shape `shape`. They start at row `first`."""

    shape: Size
    first: int


def cut_layers(model: nn.Module) -> dict[str, CutLayer]:
    """Return the layers that are split into chunks, by name."""
    split_layers = {}
    for name, module in model.named_modules():
        parameter_names = tuple(key for key, _ in module.named_parameters(recurse=False))
        forward = vars(module).get("forward")
        if isinstance(module, ColumnLinear):
            split_layers[name] = CutLayer(module, module.chunks, parameter_names)
        elif isinstance(module, RowLinear):
            split_layers[name] = CutLayer(module, module.chunks, ("weight",))
        elif isinstance(forward, Experts):
            split_layers[name] = CutLayer(module, forward.chunks, parameter_names)
        elif isinstance(forward, LookUp | Head):
            split_layers[name] = CutLayer(module, forward.chunks, parameter_names, forward.rows)
    return split_layers


def places(model: nn.Module, layers: Mapping[str, CutLayer], rank: int, ranks: int) -> dict[str, RowPlace]:
    """Return the locations of the split parameters on rank `rank` of `ranks`, under all of their names."""
    row_places = {}
    for layer in layers.values():
        for key in layer.parameters:
            parameter = getattr(layer.module, key)
            rows = layer.rows or len(parameter) * ranks
            row_places[parameter] = RowPlace(
                Size([rows, *parameter.shape[1:]]), _own_rows(rows, layer, rank, ranks).start
            )
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name: row_places[parameter] for name, parameter in named_parameters if parameter in row_places}


def check_shared(layers: Mapping[str, CutLayer], ranks: int, strategy: str = "tensor") -> None:
    """Raise UsageError if `ranks` ranks can't share the chunks of these layers evenly."""
    if not layers and ranks > 1:
        raise UsageError(
            f"strategy {strategy}: recipe.model.chunks is 1, so there is nothing to share; set it to a multiple of "
            f"{ranks}, which changes the weights, or use a different strategy"
        )
    for name, layer in layers.items():
        count = layer.chunks.count
        if count % ranks:
            options = ", ".join(map(str, divisors(count)))
            raise UsageError(
                f"strategy {strategy}: {ranks} processes cannot share the {count} chunks of {name}; use {options}"
            )


def keep_own_chunks(model: nn.Module, world: World, mesh: Mesh) -> nn.Module:
    """Keep only this rank's chunks along the tensor axis, in place. Returns the model. All ranks must call this."""
    rank = mesh.coordinate(world.rank).tensor
    across = world.canonical(mesh, "tensor", side_stream=False)
    layers = cut_layers(model)
    check_shared(layers, mesh.tensor)
    keep_part(layers.values(), rank, mesh.tensor)
    for chunks in {id(layer.chunks): layer.chunks for layer in layers.values()}.values():
        chunks.share(rank, mesh.tensor, across)
    return model


def keep_part(layers: Iterable[CutLayer], rank: int, ranks: int) -> None:
    """Keep only the rows of the split parameters that belong to rank `rank` of `ranks`, in place."""
    kept_parameters: dict[nn.Parameter, nn.Parameter] = {}  # shared, because two layers can share a weight
    for layer in layers:
        for key in layer.parameters:
            parameter = getattr(layer.module, key)
            if parameter not in kept_parameters:
                rows = _own_rows(len(parameter), layer, rank, ranks)
                data = parameter.detach()[rows.start : rows.stop].clone()
                kept_parameters[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            setattr(layer.module, key, kept_parameters[parameter])


def _own_rows(rows: int, layer: CutLayer, rank: int, ranks: int) -> range:
    """Return the range of rows in the chunks of a rank, out of `rows` rows."""
    count = layer.chunks.count
    chunk_indices = part(count, ranks, rank)
    return range(part(rows, count, chunk_indices[0]).start, part(rows, count, chunk_indices[-1]).stop)


def own_slice(build: Build, world: World, mesh: Mesh) -> nn.Module:
    """Build a model and keep only this rank's chunks. All ranks must call this function."""
    return keep_own_chunks(build(), world, mesh)


def slice_layout(world: World, mesh: Mesh, make: MakeLayout) -> MakeLayout:
    """Return a function that creates the layout of this rank's slice with `make`, as rows of the full model."""

    def make_sliced(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        own_slice = Slice.for_rank(model, world, mesh)
        layout, gradients = make(model, stream, dtype)
        return SlicedLayout(world, own_slice, layout), gradients

    return make_sliced


@final
class Slice:
    """The part of a model on this rank: some rows of the split parameters, and all replicated tensors."""

    def __init__(self, cut: Mapping[str, RowPlace], rank: int, primary: bool = True) -> None:
        """Create a slice. `cut` maps split parameters to the locations of the rows on rank `rank`."""
        self.first = not rank  # whether this rank reports tensors that are the same on all ranks along the axis
        self.primary = primary  # whether this rank reports its chunks, among the ranks with the same chunks
        self._cut = cut

    @classmethod
    def for_rank(cls, model: nn.Module, world: World, mesh: Mesh) -> Self:
        """Return this rank's slice along the tensor axis of the mesh."""
        coordinate = mesh.coordinate(world.rank)
        primary = not (coordinate.replicate or coordinate.context)
        return cls(places(model, cut_layers(model), coordinate.tensor, mesh.tensor), coordinate.tensor, primary)

    def as_part(self, name: str, tensor: MaybeSharded) -> MaybeSharded:
        """Return a tensor of the slice as rows of the full tensor, or unchanged if it is replicated."""
        if isinstance(tensor, Shard):
            return self.part(name, tensor)
        return self.part(name, Shard(tensor.detach(), 0, tensor.shape, self.primary)) if name in self._cut else tensor

    def part(self, name: str, shard: Shard) -> Shard:
        """Return rows of a tensor of the slice as rows of the full tensor."""
        if name not in self._cut:
            return replace(shard, primary=shard.primary and self.first)
        row_place = self._cut[name]
        return replace(shard, first=row_place.first + shard.first, shape=row_place.shape)


@final
class SlicedLayout:
    """Wraps the `layout` of a rank's slice, and reports its tensors as rows of the full model."""

    def __init__(self, world: World, own_slice: Slice, layout: Layout) -> None:
        self._place = own_slice
        self._layout = layout
        self.trained = layout.trained
        self.collect, self.publish, self.reload = layout.collect, layout.publish, layout.reload
        self.norms = norms_of_rows(world, {tensor: self._part(name, tensor) for name, tensor in self.trained})

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        return {name: self._place.as_part(name, tensor) for name, tensor in self._layout.state().items()}

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """See GathersWeights. Empty if the layout of the slice doesn't shard parameters."""
        return self._layout.gathered_shards() if isinstance(self._layout, GathersWeights) else {}

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return self._place.as_part(name, self._layout.as_shard(name, tensor))

    def _part(self, name: str, tensor: Tensor) -> Shard:
        """Return a trained tensor as a Shard that also records whether this rank reports it."""
        shard = self.as_shard(name, tensor)
        primary = self._place.primary and self._place.first
        return shard if isinstance(shard, Shard) else Shard(shard, 0, shard.shape, primary)
