"""A model in chunks of which this rank keeps its own, and where these are in the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self, final

import torch
from torch import Size, Tensor, nn

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core.mesh import Mesh
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.core.work import divisors
from lockstep.errors import UsageError
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, RowNorms, add_flags_
from lockstep.parallel.tensor.chunks import Chunks
from lockstep.parallel.tensor.experts import Experts
from lockstep.parallel.tensor.layers import ColumnLinear, RowLinear


class CutLayer(NamedTuple):
    """A layer that is cut into chunks, and which of its parameters are."""

    module: nn.Module
    chunks: Chunks
    parameters: tuple[str, ...]


def cut_layers(model: nn.Module) -> dict[str, CutLayer]:
    """Return the layers that are cut into chunks, by name."""
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
    return found


def cut_shapes(model: nn.Module, layers: Mapping[str, CutLayer]) -> dict[str, Size]:
    """Return the shapes of those parameters of these layers that are cut, by each of their names."""
    cut = {getattr(layer.module, key) for layer in layers.values() for key in layer.parameters}
    every = model.named_parameters(remove_duplicate=False)
    return {name: parameter.shape for name, parameter in every if parameter in cut}


def check_shared(layers: Mapping[str, CutLayer], ranks: int, strategy: str = "tensor") -> None:
    """Raise UsageError where so many ranks cannot share the chunks of these layers, each as many as the next."""
    if not layers and ranks > 1:
        raise UsageError(
            f"strategy {strategy}: recipe.model.chunks is 1, so there is nothing to share; set it to a number that "
            f"{ranks} divides (it changes the bits, as any key of a recipe may), or use another strategy"
        )
    for name, layer in layers.items():
        count = layer.chunks.count
        if count % ranks:
            fitting = ", ".join(map(str, divisors(count)))
            raise UsageError(
                f"strategy {strategy}: {ranks} processes cannot share the {count} chunks of {name}; use {fitting}"
            )


def keep_own_chunks(model: nn.Module, world: World, mesh: Mesh) -> nn.Module:
    """Drop, in place, the chunks of the other ranks of the mesh's tensor axis; return the model. All ranks call it."""
    rank = mesh.coordinate(world.rank).tensor
    across = world.canonical(mesh, "tensor", beside=False)
    layers = cut_layers(model)
    check_shared(layers, mesh.tensor)
    keep_part(layers.values(), rank, mesh.tensor)
    for chunks in {id(layer.chunks): layer.chunks for layer in layers.values()}.values():
        chunks.share(rank, mesh.tensor, across)
    return model


def keep_part(layers: Iterable[CutLayer], rank: int, ranks: int) -> None:
    """Keep of what is cut the part of the `rank`-th of so many ranks alone."""
    for layer in layers:
        for key in layer.parameters:
            whole = getattr(layer.module, key)
            own = whole.detach().tensor_split(ranks)[rank].clone()
            setattr(layer.module, key, nn.Parameter(own, requires_grad=whole.requires_grad))


def own_slice(build: Callable[[], nn.Module], world: World, mesh: Mesh) -> nn.Module:
    """Build a model, of which a rank keeps its own chunks."""
    return keep_own_chunks(build(), world, mesh)


def sliced(world: World, mesh: Mesh, make: MakeLayout) -> MakeLayout:
    """Return what lays out a rank's own slice of a model by `make`, and reports it as part of the whole."""

    def make_sliced(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        place = Slice.of(model, world, mesh)
        layout, gradients = make(model, stream, dtype)
        return SlicedLayout(world, place, layout), gradients

    return make_sliced


@final
class Slice:
    """Which part of a model in chunks a rank has: of what is cut some rows, and of the rest what all have alike."""

    def __init__(self, cut: Mapping[str, Size], rank: int, ranks: int, primary: bool = True) -> None:
        """Take the shapes of the parameters of which the `rank`-th of so many ranks has its own chunks alone."""
        self._rank, self._ranks = rank, ranks
        self.first = not rank  # whether it reports what all of these ranks have alike
        self.primary = primary  # and whether what its replicas have alike
        self._cut = cut

    @classmethod
    def of(cls, model: nn.Module, world: World, mesh: Mesh) -> Self:
        """Return that of a model which the ranks of the mesh's tensor axis share."""
        at = mesh.coordinate(world.rank)
        return cls(cut_shapes(model, cut_layers(model)), at.tensor, mesh.tensor, not at.replicate)

    def placed(self, name: str, held: MaybeSharded) -> MaybeSharded:
        """Return what the rank has of a tensor of its slice as a part of the whole one."""
        if isinstance(held, Shard):
            return self.part(name, held)
        return self.part(name, Shard(held.detach(), 0, held.shape, self.primary)) if name in self._cut else held

    def part(self, name: str, own: Shard) -> Shard:
        """Return rows of a tensor of the slice as rows of the whole one."""
        if name not in self._cut:
            return replace(own, primary=own.primary and self.first)
        height, *others = self._cut[name]
        whole = Size([height * self._ranks, *others])
        return replace(own, first=self._rank * height + own.first, shape=whole)


@final
class SlicedLayout:
    """The layout `own` of a rank's slice, reported as rows of the whole."""

    def __init__(self, world: World, place: Slice, own: Layout) -> None:
        self._world = world
        self._place = place
        self._own = own
        self.trained = own.trained
        self._norms = RowNorms(world, {tensor: self._part(name, tensor) for name, tensor in self.trained}, world.device)

    def state(self) -> dict[str, MaybeSharded]:
        """See Layout."""
        return {name: self._place.placed(name, held) for name, held in self._own.state().items()}

    def held(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return self._place.placed(name, self._own.held(name, tensor))

    def all_row_norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """See Layout."""
        return self._norms.of_rows({own: tensor for (_, own), tensor in zip(self.trained, tensors, strict=True)})

    def norms(self, tensors: Mapping[Tensor, Tensor]) -> Tensor:
        """See Layout."""
        return self._norms.of_tensors(tensors)

    def agree_(self, flags: Sequence[Tensor]) -> None:
        """See Layout."""
        add_flags_(self._world, flags)

    def collect(self) -> None:
        """See Layout."""
        self._own.collect()

    def publish(self) -> None:
        """See Layout."""
        self._own.publish()

    def reload(self) -> None:
        """See Layout."""
        self._own.reload()

    def _part(self, name: str, tensor: Tensor) -> Shard:
        """Return what this rank answers for."""
        held = self.held(name, tensor)
        return (
            held if isinstance(held, Shard) else Shard(held, 0, held.shape, self._place.primary and self._place.first)
        )
