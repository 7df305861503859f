"""Regions: parts of a model that are split into chunks of features and computed one chunk at a time.

Shoeybi et al. 2019, "Megatron-LM", section 3: a layer with split outputs needs no communication, and a layer with split
inputs computes partial sums. Unlike in Megatron-LM, the unit of computation is a chunk. The code from such a first
layer to the last layer, a *region*, is called once for each chunk, on the rank that holds the chunk. Therefore matrix
products, activations, attention and dropout always have the shape and the random numbers of one chunk. The reduction
tree (core/tree.py) adds the partial sums, first within a rank and then over the ranks along the tensor axis of the
mesh. This means that the results have the same bits for any number of ranks.

For example, a rank with chunks 2 and 3 computes a region in these phases:

1. It calls the region for chunk 2. The first layers (`ColumnLinear`) compute the outputs of both chunks, and return the
   outputs of chunk 2. From here on, the random number generators are seeded for chunk 2.
2. The last layer (`RowLinear`) stores its inputs and ends the call.
3. It calls the region for chunk 3. The first layers return the stored outputs of chunk 3.
4. Now the last layer has the inputs of all chunks of this rank, and returns the sum over all ranks. The generators
   continue from their state before they were seeded for chunk 2, and the rest of the module is computed once.
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
from lockstep.core.order import get_subrange
from lockstep.core.tree import Counter, LeafBlock


class ForwardGroup(Protocol):
    """The `count` forward passes that execute regions together. This rank runs those with `local_indices`.

    By default, there is one forward pass. If ranks split sequences outside regions (sequence_parallel.py), there is one
    forward pass for each chunk of a sequence.
    """

    @property
    def count(self) -> int: ...

    @property
    def local_indices(self) -> range: ...

    @property
    def in_progress(self) -> bool: ...

    def enter(self, region: "Region", call: partial[Any]) -> None:
        """Announce that a forward pass of this rank calls `region`, so that other ranks can call the region too."""

    def exchange(self, label: str, joint: Callable[[Sequence[Any]], Sequence[Any]], inputs: Any) -> Any:
        """Call `joint` with the `inputs` of all forward passes, and return the result for this forward pass.

        `label` describes the exchange in error messages.
        """

    def gather(self, local: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of all forward passes. `local` contains this rank's tensors, all of the same shape."""

    def scatter(self, pieces: Sequence[Mapping[LeafBlock, Tensor]], num_chunks: int) -> list[Tensor]:
        """Return the sum over all chunks of a region, for each forward pass of this rank.

        `pieces` contains this rank's partial sums for each forward pass, by block of the reduction tree.
        """


@final
class Region:
    """A region that is split into `num_chunks` chunks. This rank computes `local_chunks`: by default, all chunks."""

    def __init__(self, num_chunks: int, name: str) -> None:
        self.num_chunks = num_chunks
        self.local_chunks = range(num_chunks)
        self.name = name
        self._canonical_sum = CanonicalSum(0, [DataRank()], None)
        self.sequence_forwards: ForwardGroup | None = None
        self._single_forward = _SingleForward(self)
        self._calls = _RegionCalls()

    def distribute(self, rank: int, ranks: int, canonical_sum: CanonicalSum) -> None:
        """Distribute the chunks over `ranks` ranks. This rank is `rank`, and `canonical_sum` sums over the ranks."""
        self.local_chunks = get_subrange(self.num_chunks, ranks, rank)
        self._canonical_sum = canonical_sum

    def call_for_earlier_chunks(self, call: partial[Any]) -> None:
        """Call the region for each chunk of this rank except the last, for which the caller must call the region."""
        self.forward_group.enter(self, call)
        self._call(call, len(self.local_chunks) - 1)

    def visit(self, call: partial[Any]) -> None:
        """Call the region for all chunks of this rank, for a forward pass on another rank (sequence_parallel.py)."""
        self._call(call, len(self.local_chunks))

    def _call(self, call: partial[Any], times: int) -> None:
        region_call = self._calls.active = _RegionCall(ChunkRng())
        for index in range(times):
            region_call.current = index
            try:
                call()
            except ChunkDone:
                region_call.rng.rewind()
            else:
                raise RuntimeError(
                    f"{self.name} was called without its rowwise layer, so it cannot be split; change recipe.model.plan"
                )
        region_call.current = len(self.local_chunks) - 1

    @property
    def forward_group(self) -> ForwardGroup:
        """The forward passes that execute the region together."""
        return (
            self.sequence_forwards
            if self.sequence_forwards is not None and self.sequence_forwards.in_progress
            else self._single_forward
        )

    @property
    def is_running(self) -> bool:
        """Whether a call of the region is in progress."""
        return self._calls.active is not None

    def outputs_for_chunk(self, layer: nn.Module, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the outputs of `layer` for the current chunk.

        For the first chunk, `compute` is called. It must return the outputs for all chunks of this rank in chunk order,
        with the same number of tensors for each chunk. Later chunks reuse these outputs.
        """
        region_call = self._calls.active
        if region_call is None:
            raise RuntimeError(
                f"a layer of {self.name} was called from outside {self.name}, so {self.name} cannot be split; change "
                f"recipe.model.plan"
            )
        if layer not in region_call.outputs:
            region_call.outputs[layer] = compute()
        if layer.training:
            region_call.rng.begin_chunk(self.local_chunks[region_call.current])
        count = len(region_call.outputs[layer]) // len(self.local_chunks)
        return region_call.outputs[layer][region_call.current * count : (region_call.current + 1) * count]

    def gather_inputs(self, inputs: Tensor) -> list[Tensor]:
        """Store the last layer's inputs, and return those of all chunks. Raises ChunkDone before the last chunk."""
        region_call = self._calls.active
        if region_call is None:
            raise RuntimeError(
                f"the rowwise layer of {self.name} was called from outside {self.name}, so {self.name} cannot be "
                f"split; change recipe.model.plan"
            )
        region_call.inputs.append(inputs)
        if region_call.current < len(self.local_chunks) - 1:
            raise ChunkDone
        region_call.rng.resume()
        del self._calls.active
        return region_call.inputs

    def iterate_chunks(self, training: bool) -> Iterator[tuple[int, int]]:
        """Yield the local and global index of each chunk of this rank. In training, seeds the generators for it."""
        rng = ChunkRng()
        for index, chunk in enumerate(self.local_chunks):
            if training:
                rng.begin_chunk(chunk)
            yield index, chunk
        rng.resume()

    def row_ranges(self, length: int) -> list[range]:
        """Return the range of rows of each chunk of this rank, if `length` rows are split into all chunks."""
        return [get_subrange(length, self.num_chunks, chunk) for chunk in self.local_chunks]

    def gather_all(self, tensor: Tensor) -> Tensor:
        """Gather `tensor` from all ranks, and return the tensors of all chunks in chunk order along dim 0.

        `tensor` contains one tensor for each chunk of this rank, stacked along dim 0. All ranks must call this method.
        """
        return self._canonical_sum.stack_ranks(tensor).flatten(0, 1)

    def sum_chunks(self, partials: Iterable[Tensor]) -> Tensor:
        """Return the sum over all chunks of all ranks. `partials` yields one tensor for each chunk of this rank.

        All tensors have the same shape, and may be overwritten. `partials` is consumed lazily, so that only a few
        tensors are in memory at the same time. All ranks must call this method in the same order.
        """
        return self.sum_pieces(self.reduce_locally(partials))

    def sum_pieces(self, pieces: Mapping[LeafBlock, Tensor]) -> Tensor:
        """Return the sum over all chunks of all ranks, given this rank's partial sums from `reduce_locally`."""
        like = next(iter(pieces.values()))
        flat = {block: piece.reshape(-1) for block, piece in pieces.items()}
        return self._canonical_sum(flat, self.num_chunks, like.reshape(-1)).view(like.shape)

    def reduce_locally(self, partials: Iterable[Tensor]) -> dict[LeafBlock, Tensor]:
        """Add the tensors as far as the reduction tree allows without communication. Returns partial sums by block."""
        counter: Counter[Tensor] = Counter(add_)
        for chunk, partial_sum in zip(self.local_chunks, partials, strict=True):
            counter.push(chunk, partial_sum)
        return counter.pieces()


@final
class _SingleForward:
    """A single forward pass, which needs no communication between forward passes."""

    def __init__(self, region: Region) -> None:
        self.count, self.local_indices, self.in_progress = 1, range(1), True
        self._region = region

    def enter(self, region: Region, call: partial[Any]) -> None:
        """See ForwardGroup."""

    def exchange(self, label: str, joint: Callable[[Sequence[Any]], Sequence[Any]], inputs: Any) -> Any:
        """See ForwardGroup."""
        return joint([inputs])[0]

    def gather(self, local: Sequence[Tensor]) -> list[Tensor]:
        """See ForwardGroup. Returns contiguous tensors, as a gather does, because strides can change kernel results."""
        return [tensor.contiguous() for tensor in local]

    def scatter(self, pieces: Sequence[Mapping[LeafBlock, Tensor]], num_chunks: int) -> list[Tensor]:
        """See ForwardGroup."""
        return [self._region.sum_pieces(pieces_of_forward) for pieces_of_forward in pieces]


@dataclass(eq=False)
class _RegionCall:
    """The state of a call of a region: its RNG, the outputs of its first layers and the inputs of its last layer."""

    rng: "ChunkRng"
    outputs: dict[nn.Module, Sequence[Tensor]] = field(default_factory=dict)  # for all chunks of this rank
    inputs: list[Tensor] = field(default_factory=list)
    current: int = 0  # the local index of the current chunk


class _RegionCalls(threading.local):
    """The call in progress on this thread. Interleaved forward passes have separate threads (cooperative.py)."""

    active: _RegionCall | None = None

    def __reduce__(self) -> "tuple[type[_RegionCalls], tuple[()]]":
        """Make deep copies of a model possible. The copy has no call in progress."""
        return _RegionCalls, ()


class ChunkDone(BaseException):
    """Raised to end the execution of a region for one chunk.

    A BaseException, because the code of the region may catch any Exception.
    """


@final
class ChunkRng:
    """Seeds the default random number generators for each chunk of a region.

    Between the first layers and the last layer of a region, the generators are seeded with `key` and the index of the
    chunk. The key is drawn when the first chunk begins. After the last layer, the generators continue from their state
    after this draw.
    """

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._saved_states = self._get_states()
        self._states_after_key: list[Tensor] = []
        self._key: int | None = None
        self._seeded_chunk: int | None = None

    def begin_chunk(self, chunk: int) -> None:
        """Seed the generators for a chunk, unless they already have this seed."""
        if chunk != self._seeded_chunk:
            self._seeded_chunk = chunk
            self.seed_chunk(self.key, chunk)

    @property
    def key(self) -> int:
        """The key for the seeds of this call of the region. Drawn on first access."""
        if self._key is None:
            self._key = int(torch.randint(1 << 62, (), generator=torch.default_generator, device="cpu"))
            self._states_after_key = self._get_states()
        return self._key

    def seed_chunk(self, key: int, chunk: int) -> None:
        """Seed the generators for `chunk` with this key."""
        for generator in self._generators:
            generator.manual_seed(random.torch_seed(random.extend_key(key, chunk)))

    def rewind(self) -> None:
        """Restore the generator states from before the key was drawn, for the next call of the region."""
        self._set_states(self._saved_states)

    def resume(self) -> None:
        """Restore the generator states from right after the key was drawn. No-op if no key was drawn."""
        if self._states_after_key:
            self._set_states(self._states_after_key)

    def _get_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_states(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
