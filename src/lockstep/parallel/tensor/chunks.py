"""Regions: parts of a model that a recipe splits into chunks of features, and that are computed chunk by chunk.

Shoeybi et al. 2019, "Megatron-LM", section 3: a layer with split outputs needs no communication, and a layer with split
inputs computes partial sums. Unlike in Megatron-LM, the unit of computation is a chunk. The code between such a pair of
layers, a *region*, is called once for each chunk, on the rank that holds the chunk. Therefore products, activations,
attention and dropout have the shape and the random numbers of one chunk on any rank. The reduction tree (core/tree.py)
adds the partial sums, first within a rank and then over the ranks along the tensor axis of the mesh. This means that
the number of these ranks doesn't change any bits.

For example, a rank with chunks 2 and 3 computes a region in these phases:

1. It calls the region for chunk 2. The first layers (`ColumnLinear`) compute the outputs of both chunks, and return the
   outputs of chunk 2. From here on, the generators are seeded for chunk 2.
2. At the last layer (`RowLinear`), the call ends. The layer stores its inputs.
3. It calls the region for chunk 3. The first layers return the stored outputs of chunk 3.
4. Now the last layer has the inputs of all chunks of this rank, and returns the sum over all ranks. The generators
   continue from their state before they were seeded for chunk 2, and the rest of the region is computed once.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import CanonicalSum, add_
from lockstep.core import random
from lockstep.core.mesh import DataRank
from lockstep.core.order import part
from lockstep.core.tree import Counter, LeafBlock


class Forwards(Protocol):
    """The `count` forward passes that go through a region together. `own` are the forward passes of this rank.

    By default, there is one forward pass. If ranks split sequences outside of regions (sequence_parallel.py), there is
    one forward pass for each chunk of a sequence.
    """

    @property
    def count(self) -> int: ...

    @property
    def own(self) -> range: ...

    @property
    def in_progress(self) -> bool: ...

    def enter(self, chunks: "Region", call: partial[Any]) -> None:
        """Announce that a forward pass of this rank calls a region, so that others can call the region too."""

    def exchange(self, place: str, joint: Callable[[Sequence[Any]], Sequence[Any]], inputs: Any) -> Any:
        """Return this forward pass's result of `joint`, which is called with the `inputs` of all forward passes."""

    def gather(self, local: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of all forward passes. `local` contains this rank's tensors, all of the same shape."""

    def scatter(self, pieces: Sequence[Mapping[LeafBlock, Tensor]], chunks: int) -> list[Tensor]:
        """Return the sum over all `chunks` chunks of a region, for each forward pass of this rank.

        `pieces` contains this rank's partial sums for each forward pass.
        """


@final
class Region:
    """The `count` chunks of a region. `own` are the chunks that this rank computes, which are all chunks by default."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self.own = range(count)
        self.name = name
        self._across = CanonicalSum(0, [DataRank()], None)
        self.visited: Forwards | None = None
        self._alone = _OneForward(self)
        self._calls = _RegionCalls()

    def share(self, rank: int, ranks: int, across: CanonicalSum) -> None:
        """Split the chunks over `ranks` ranks. This rank is `rank`, and `across` sums over the ranks."""
        self.own = part(self.count, ranks, rank)
        self._across = across

    def call_for_earlier_chunks(self, call: partial[Any]) -> None:
        """Call the region for all chunks of this rank except the last. The caller then calls it for the last chunk."""
        self.forwards.enter(self, call)
        self._call(call, len(self.own) - 1)

    def visit(self, call: partial[Any]) -> None:
        """Call the region for all chunks of this rank, for a forward pass on another rank (sequence_parallel.py)."""
        self._call(call, len(self.own))

    def _call(self, call: partial[Any], times: int) -> None:
        region_call = self._calls.active = _RegionCall(Draws())
        for number in range(times):
            region_call.current = number
            try:
                call()
            except ChunkDone:
                region_call.draws.rewind()
            else:
                raise RuntimeError(
                    f"{self.name} was called without its rowwise layer, so it cannot be split; change recipe.model.plan"
                )
        region_call.current = len(self.own) - 1

    @property
    def forwards(self) -> Forwards:
        """The forward passes that go through the region together."""
        return self.visited if self.visited is not None and self.visited.in_progress else self._alone

    @property
    def computing(self) -> bool:
        """Whether a call of the region is in progress, i.e. between its first layers and its last layer."""
        return self._calls.active is not None

    def begin(self, layer: nn.Module, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the outputs of `layer` for the current chunk.

        When `layer` is called for the first chunk, `compute` is called for the outputs of all chunks of this rank, in
        the order of the chunks. It must return the same number of tensors for each chunk.
        """
        region_call = self._calls.active
        if region_call is None:
            raise RuntimeError(
                f"a layer of {self.name} was called outside of it, so it cannot be split; change recipe.model.plan"
            )
        if layer not in region_call.outputs:
            region_call.outputs[layer] = compute()
        if layer.training:
            region_call.draws.for_chunk(self.own[region_call.current])
        count = len(region_call.outputs[layer]) // len(self.own)
        return region_call.outputs[layer][region_call.current * count : (region_call.current + 1) * count]

    def gather(self, inputs: Tensor) -> list[Tensor]:
        """Return the inputs of the last layer for all chunks of this rank. Raises ChunkDone before the last chunk."""
        region_call = self._calls.active
        if region_call is None:
            raise RuntimeError(
                f"the rowwise layer of {self.name} was called outside of it, so it cannot be split; change "
                f"recipe.model.plan"
            )
        region_call.inputs.append(inputs)
        if region_call.current < len(self.own) - 1:
            raise ChunkDone
        region_call.draws.resume()
        del self._calls.active
        return region_call.inputs

    def iterate(self, training: bool) -> Iterator[tuple[int, int]]:
        """Yield the position and index of each chunk of this rank. In training, seeds the generators for the chunk."""
        draws = Draws()
        for index, chunk in enumerate(self.own):
            if training:
                draws.for_chunk(chunk)
            yield index, chunk
        draws.resume()

    def rows(self, length: int) -> list[range]:
        """Return the range of rows for each chunk of this rank. `length` doesn't have to be a multiple of `count`."""
        return [part(length, self.count, chunk) for chunk in self.own]

    def gather_all(self, tensor: Tensor) -> Tensor:
        """Gather the tensors of all chunks in order along dim 0. All ranks must call this with their own chunks."""
        return self._across.stack_ranks(tensor).flatten(0, 1)

    def total(self, partials: Iterable[Tensor]) -> Tensor:
        """Return the sum of tensors with the same shape over all chunks. The tensors in `partials` may be overwritten.

        `partials` is consumed lazily, so that only a few tensors are in memory at the same time. All ranks that share
        the chunks must call this method in the same order.
        """
        return self.add(self.pieces(partials))

    def add(self, pieces: Mapping[LeafBlock, Tensor]) -> Tensor:
        """Return the sum over all chunks, given this rank's pieces of the sum. The other ranks pass their pieces."""
        like = next(iter(pieces.values()))
        flat = {block: piece.reshape(-1) for block, piece in pieces.items()}
        return self._across(flat, self.count, like.reshape(-1)).view(like.shape)

    def pieces(self, partials: Iterable[Tensor]) -> dict[LeafBlock, Tensor]:
        """Return the partial sums that this rank can compute locally, by block of the reduction tree."""
        counter: Counter[Tensor] = Counter(add_)
        for chunk, partial_sum in zip(self.own, partials, strict=True):
            counter.push(chunk, partial_sum)
        return counter.pieces()


@final
class _OneForward:
    """A single forward pass, which needs no communication between forward passes."""

    def __init__(self, chunks: Region) -> None:
        self.count, self.own, self.in_progress = 1, range(1), True
        self._chunks = chunks

    def enter(self, chunks: Region, call: partial[Any]) -> None:
        """See Forwards."""

    def exchange(self, place: str, joint: Callable[[Sequence[Any]], Sequence[Any]], inputs: Any) -> Any:
        """See Forwards."""
        return joint([inputs])[0]

    def gather(self, local: Sequence[Tensor]) -> list[Tensor]:
        """See Forwards. Makes tensors contiguous like gathered tensors, because strides can change a kernel's bits."""
        return [tensor.contiguous() for tensor in local]

    def scatter(self, pieces: Sequence[Mapping[LeafBlock, Tensor]], chunks: int) -> list[Tensor]:
        """See Forwards."""
        return [self._chunks.add(pieces_of_forward) for pieces_of_forward in pieces]


@dataclass(eq=False)
class _RegionCall:
    """A call of a region, with its random numbers, the outputs of its first layers and the inputs of its last layer."""

    draws: "Draws"
    outputs: dict[nn.Module, Sequence[Tensor]] = field(default_factory=dict)  # for all chunks of this rank
    inputs: list[Tensor] = field(default_factory=list)
    current: int = 0  # the position of the current chunk among this rank's chunks


class _RegionCalls(threading.local):
    """The call in progress. Thread-local, because interleaved forward passes have threads (parallel/cooperative.py)."""

    active: _RegionCall | None = None

    def __reduce__(self) -> "tuple[type[_RegionCalls], tuple[()]]":
        """Support copies of a model. A copy has no call in progress."""
        return _RegionCalls, ()


class ChunkDone(BaseException):
    """Ends a call of a region. A BaseException, because the code of the region may catch any Exception."""


@final
class Draws:
    """The random numbers of a region.

    The generators don't change before its first layers and after its last layer. In between, they are seeded for each
    chunk with `key` and the index of the chunk. The key is drawn when the first chunk begins.
    """

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._saved_states = self._states()
        self._states_after_key: list[Tensor] = []
        self._key: int | None = None
        self._seeded_chunk: int | None = None

    def for_chunk(self, chunk: int) -> None:
        """Seed the generators for a chunk, unless they already have this seed."""
        if chunk != self._seeded_chunk:
            self._seeded_chunk = chunk
            self.seed_chunk(self.key, chunk)

    @property
    def key(self) -> int:
        """The key for the seeds of this call. It is drawn on first access."""
        if self._key is None:
            self._key = int(torch.randint(1 << 62, (), generator=torch.default_generator, device="cpu"))
            self._states_after_key = self._states()
        return self._key

    def seed_chunk(self, key: int, chunk: int) -> None:
        """Seed the generators with this key and chunk."""
        for generator in self._generators:
            generator.manual_seed(random.torch_seed(random.extend_key(key, chunk)))

    def rewind(self) -> None:
        """Restore the generator states from before the first layers."""
        self._set_states(self._saved_states)

    def resume(self) -> None:
        """Restore the generator states from after the key was drawn, as if the chunks hadn't drawn any numbers."""
        if self._states_after_key:
            self._set_states(self._states_after_key)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_states(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
