"""Model slices: this rank's chunks of a model, and their place in the whole model."""

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
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, norms_of_rows
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.experts import Experts
from lockstep.parallel.tensor.layers import ColumnLinear, RowLinear
from lockstep.parallel.tensor.vocab import Head, LookUp
from lockstep.tasks.base import Build


class CutLayer(NamedTuple):
    """A layer that is split into chunks, and the names of its parameters that are split.

    If chunks can have different numbers of rows, `rows` is the number of rows of the whole parameters.
    """

    module: nn.Module
    chunks: Region
    parameters: tuple[str, ...]
    rows: int | None = None


class RowPlace(NamedTuple):
    """The place of a rank's rows in the whole parameter of `shape`. They start at row `first`."""

    shape: Size
    first: int


def cut_layers(model: nn.Module) -> dict[str, CutLayer]:
    """Return the layers that are split into chunks, by name."""
    found = {}
    for name, module in model.named_modules():
        own = tuple(key for key, _ in module.named_parameters(recurse=False))
        replaced = vars(module).get("forward")
        if isinstance(module, ColumnLinear):
            found[name] = CutLayer(module, module.chunks, own)
        elif isinstance(module, RowLinear):
            found[name] = CutLayer(module, module.chunks, ("weight",))
        elif isinstance(replaced, Experts):
            found[name] = CutLayer(module, replaced.chunks, own)
        elif isinstance(replaced, LookUp | Head):
            found[name] = CutLayer(module, replaced.chunks, own, replaced.rows)
    return found


def places(model: nn.Module, layers: Mapping[str, CutLayer], rank: int, ranks: int) -> dict[str, RowPlace]:
    """Return the places of the split parameters of rank `rank` out of `ranks`, under all of their names."""
    cut = {}
    for layer in layers.values():
        for key in layer.parameters:
            own = getattr(layer.module, key)
            rows = layer.rows or len(own) * ranks
            cut[own] = RowPlace(Size([rows, *own.shape[1:]]), _own_rows(rows, layer, rank, ranks).start)
    every = model.named_parameters(remove_duplicate=False)
    return {name: cut[parameter] for name, parameter in every if parameter in cut}


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
            fitting = ", ".join(map(str, divisors(count)))
            raise UsageError(
                f"strategy {strategy}: {ranks} processes cannot share the {count} chunks of {name}; use {fitting}"
            )


def keep_own_chunks(model: nn.Module, world: World, mesh: Mesh) -> nn.Module:
    """Keep only this rank's chunks along the tensor axis, in place. Returns the model. All ranks must call it."""
    rank = mesh.coordinate(world.rank).tensor
    across = world.canonical(mesh, "tensor", side_stream=False)
    layers = cut_layers(model)
    check_shared(layers, mesh.tensor)
    keep_part(layers.values(), rank, mesh.tensor)
    for chunks in {id(layer.chunks): layer.chunks for layer in layers.values()}.values():
        chunks.share(rank, mesh.tensor, across)
    return model


def keep_part(layers: Iterable[CutLayer], rank: int, ranks: int) -> None:
    """Keep only the part of rank `rank` out of `ranks` of the split parameters, in place."""
    kept: dict[nn.Parameter, nn.Parameter] = {}  # two layers can share a weight
    for layer in layers:
        for key in layer.parameters:
            whole = getattr(layer.module, key)
            if whole not in kept:
                rows = _own_rows(len(whole), layer, rank, ranks)
                own = whole.detach()[rows.start : rows.stop].clone()
                kept[whole] = nn.Parameter(own, requires_grad=whole.requires_grad)
            setattr(layer.module, key, kept[whole])


def _own_rows(rows: int, layer: CutLayer, rank: int, ranks: int) -> range:
    """Return the range of rows that are in the chunks of a rank. `rows` is the number of all rows."""
    count = layer.chunks.count
    own = part(count, ranks, rank)
    return range(part(rows, count, own[0]).start, part(rows, count, own[-1]).stop)


def own_slice(build: Build, world: World, mesh: Mesh) -> nn.Module:
    """Build a model and keep only this rank's chunks. All ranks must call it."""
    return keep_own_chunks(build(), world, mesh)


def slice_layout(world: World, mesh: Mesh, make: MakeLayout) -> MakeLayout:
    """Return a function that creates the layout of this rank's slice with `make`, as part of the whole model."""

    def make_sliced(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        place = Slice.of(model, world, mesh)
        layout, gradients = make(model, stream, dtype)
        return SlicedLayout(world, place, layout), gradients

    return make_sliced


@final
class Slice:
    """The part of a model that a rank has: some rows of the split parameters, and all replicated tensors."""

    def __init__(self, cut: Mapping[str, RowPlace], rank: int, primary: bool = True) -> None:
        """`cut` has the places of the split parameters of rank `rank`."""
        self.first = not rank  # whether this rank reports the tensors that are the same on all ranks of the axis
        self.primary = primary  # whether it reports its chunks, among the ranks that have the same chunks
        self._cut = cut

    @classmethod
    def of(cls, model: nn.Module, world: World, mesh: Mesh) -> Self:
        """Return this rank's slice along the mesh's tensor axis."""
        at = mesh.coordinate(world.rank)
        primary = not (at.replicate or at.context)
        return cls(places(model, cut_layers(model), at.tensor, mesh.tensor), at.tensor, primary)

    def as_part(self, name: str, held: MaybeSharded) -> MaybeSharded:
        """Return a tensor of the slice as a part of the whole tensor."""
        if isinstance(held, Shard):
            return self.part(name, held)
        return self.part(name, Shard(held.detach(), 0, held.shape, self.primary)) if name in self._cut else held

    def part(self, name: str, own: Shard) -> Shard:
        """Return rows of a tensor of the slice as rows of the whole tensor."""
        if name not in self._cut:
            return replace(own, primary=own.primary and self.first)
        place = self._cut[name]
        return replace(own, first=place.first + own.first, shape=place.shape)


@final
class SlicedLayout:
    """Wraps the layout `own` of a rank's slice, and reports its tensors as rows of the whole model."""

    def __init__(self, world: World, place: Slice, own: Layout) -> None:
        self._place = place
        self._own = own
        self.trained = own.trained
        self.collect, self.publish, self.reload = own.collect, own.publish, own.reload
        self.norms = norms_of_rows(world, {tensor: self._part(name, tensor) for name, tensor in self.trained})

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        return {name: self._place.as_part(name, held) for name, held in self._own.state().items()}

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return self._place.as_part(name, self._own.as_shard(name, tensor))

    def _part(self, name: str, tensor: Tensor) -> Shard:
        """Return a trained tensor as a Shard, including whether this rank reports it."""
        held = self.as_shard(name, tensor)
        primary = self._place.primary and self._place.first
        return held if isinstance(held, Shard) else Shard(held, 0, held.shape, primary)
