"""Regions: parts of a model that are split into chunks of features and computed one chunk at a time.

As in Megatron-LM (Shoeybi et al. 2019, section 3), the outputs of the first layers and the inputs of the last layer are
split. The first layers need no communication, and the last layer computes partial sums. Unlike in Megatron-LM, the unit
of computation is a chunk. The code from the first layers to the last layer is a *region*. A region is called once for
each chunk, on the rank that holds the chunk. Therefore matrix products, activations, attention and dropout always have
the shape and the random numbers of one chunk. The reduction tree (core/tree.py) adds the partial sums, first within a
rank and then over the ranks along the tensor axis of the mesh. This way, the results have the same bits for any number
of ranks.

For example, a rank with chunks 2 and 3 computes a region in these phases:

1. It calls the region for chunk 2. The first layers (`ColumnLinear`) compute the outputs of both chunks, and return the
   outputs of chunk 2. From here on, the random number generators are seeded for chunk 2.
2. The last layer (`RowLinear`) stores its inputs and ends the call.
3. It calls the region for chunk 3. The first layers return the stored outputs of chunk 3.
4. Now the last layer has the inputs of all chunks of this rank, and returns the sum over all ranks. The generators
   are restored to their states from before chunk 2, and the rest of the module is computed once.
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
from lockstep.core.tree import BinaryCounter, LeafBlock


class ForwardGroup(Protocol):
    """A group of `num_forwards` forward passes that execute regions together.

    This rank runs the forward passes with `local_indices`. By default, there is only one forward pass. If ranks split
    sequences outside regions (sequence_parallel.py), there is one forward pass for each chunk of a sequence.
    """

    @property
    def num_forwards(self) -> int: ...

    @property
    def local_indices(self) -> range: ...

    @property
    def in_progress(self) -> bool: ...

    def enter(self, region: "Region", call: partial[Any]) -> None:
        """Announce that a forward pass of this rank calls `region`, so that all ranks call the region."""

    def exchange(self, label: str, joint_function: Callable[[Sequence[Any]], Sequence[Any]], inputs: Any) -> Any:
        """Call `joint_function` with the `inputs` of all forward passes, and return the result for this forward pass.

        `label` describes the exchange in error messages.
        """

    def all_gather(self, local_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of all forward passes.

        `local_tensors` contains this rank's tensors, all of the same shape.
        """

    def reduce_scatter(self, partial_sums: Sequence[Mapping[LeafBlock, Tensor]], num_chunks: int) -> list[Tensor]:
        """Sum over all chunks of a region on all ranks. Returns the sum for each forward pass of this rank.

        `partial_sums` contains this rank's partial sums for all forward passes, by block of the reduction tree.
        """


@final
class Region:
    """A region with `num_chunks` chunks. This rank computes `local_chunks`, which defaults to all chunks."""

    def __init__(self, num_chunks: int, name: str) -> None:
        self.num_chunks = num_chunks
        self.local_chunks = range(num_chunks)
        self.name = name
        self._canonical_sum = CanonicalSum(0, [DataRank()], None)
        self.sequence_forwards: ForwardGroup | None = None
        self._single_forward = _SingleForward(self)
        self._calls = _RegionCalls()

    def distribute(self, rank: int, num_ranks: int, canonical_sum: CanonicalSum) -> None:
        """Keep only the chunks of rank `rank` of `num_ranks`.

        From now on, `canonical_sum` sums over these ranks.
        """
        self.local_chunks = get_subrange(self.num_chunks, num_ranks, rank)
        self._canonical_sum = canonical_sum

    def call_for_earlier_chunks(self, call: partial[Any]) -> None:
        """Call the region for all chunks of this rank except the last. The caller must call it for the last chunk."""
        self.forward_group.enter(self, call)
        self._call_for_chunks(call, len(self.local_chunks) - 1)

    def visit(self, call: partial[Any]) -> None:
        """Call the region for all chunks of this rank, for a different rank's forward pass (sequence_parallel.py)."""
        self._call_for_chunks(call, len(self.local_chunks))

    def _call_for_chunks(self, call: partial[Any], num_chunks: int) -> None:
        region_call = self._calls.active = _RegionCall(ChunkRng())
        for index in range(num_chunks):
            region_call.chunk_index = index
            try:
                call()
            except ChunkDone:
                region_call.rng.rewind()
            else:
                raise RuntimeError(
                    f"{self.name} was called without its rowwise layer, so it cannot be split; set its layers to "
                    f"whole in recipe.model.plan"
                )
        region_call.chunk_index = len(self.local_chunks) - 1

    @property
    def forward_group(self) -> ForwardGroup:
        """The group of forward passes that currently execute the region."""
        return (
            self.sequence_forwards
            if self.sequence_forwards is not None and self.sequence_forwards.in_progress
            else self._single_forward
        )

    @property
    def is_running(self) -> bool:
        """Whether a call of the region is in progress."""
        return self._calls.active is not None

    def get_chunk_outputs(self, layer: nn.Module, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the outputs of `layer` for the current chunk.

        In the first call, `compute` computes the outputs for all chunks of this rank. It must return them in chunk
        order, with the same number of tensors for each chunk. The calls for later chunks reuse these outputs.
        """
        region_call = self._calls.active
        if region_call is None:
            raise RuntimeError(
                f"a layer of {self.name} was called from outside {self.name}, so {self.name} cannot be split; set its "
                f"layers to whole in recipe.model.plan"
            )
        if layer not in region_call.outputs:
            region_call.outputs[layer] = compute()
        if layer.training:
            region_call.rng.begin_chunk(self.local_chunks[region_call.chunk_index])
        count = len(region_call.outputs[layer]) // len(self.local_chunks)
        return region_call.outputs[layer][region_call.chunk_index * count : (region_call.chunk_index + 1) * count]

    def collect_inputs(self, inputs: Tensor) -> list[Tensor]:
        """Store the last layer's inputs for the current chunk. Raises ChunkDone until the last chunk.

        For the last chunk, returns the inputs for all chunks of this rank.
        """
        region_call = self._calls.active
        if region_call is None:
            raise RuntimeError(
                f"the rowwise layer of {self.name} was called from outside {self.name}, so {self.name} cannot be "
                f"split; set its layers to whole in recipe.model.plan"
            )
        region_call.inputs.append(inputs)
        if region_call.chunk_index < len(self.local_chunks) - 1:
            raise ChunkDone
        region_call.rng.resume()
        del self._calls.active
        return region_call.inputs

    def iterate_chunks(self, training: bool) -> Iterator[tuple[int, int]]:
        """Yield the local and the global index of each chunk of this rank.

        If `training` is set, the generators are seeded for each chunk before it is yielded.
        """
        rng = ChunkRng()
        for index, chunk in enumerate(self.local_chunks):
            if training:
                rng.begin_chunk(chunk)
            yield index, chunk
        rng.resume()

    def get_row_ranges(self, num_rows: int) -> list[range]:
        """Split `num_rows` rows into chunks, and return the range of rows of each of this rank's chunks."""
        return [get_subrange(num_rows, self.num_chunks, chunk) for chunk in self.local_chunks]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All-gather one tensor per chunk. Returns the tensors of all chunks, stacked along dim 0 in chunk order.

        `tensor` contains the tensors of this rank's chunks, stacked along dim 0. All ranks must call this method.
        """
        return self._canonical_sum.all_gather(tensor).flatten(0, 1)

    def sum_chunks(self, partials: Iterable[Tensor]) -> Tensor:
        """Return the sum over the chunks of all ranks. `partials` yields one tensor for each chunk of this rank.

        The tensors must have the same shape, and may be overwritten. They are consumed lazily, so that only a few are
        in memory at the same time. All ranks must call this method in the same order.
        """
        return self.sum_pieces(self.reduce_locally(partials))

    def sum_pieces(self, partial_sums: Mapping[LeafBlock, Tensor]) -> Tensor:
        """Return the sum over the chunks of all ranks, given this rank's partial sums from `reduce_locally`."""
        like = next(iter(partial_sums.values()))
        flat = {block: piece.reshape(-1) for block, piece in partial_sums.items()}
        return self._canonical_sum(flat, self.num_chunks, like.reshape(-1)).view(like.shape)

    def reduce_locally(self, partials: Iterable[Tensor]) -> dict[LeafBlock, Tensor]:
        """Add the tensors of this rank's chunks. Returns the partial sums by block of the reduction tree."""
        counter: BinaryCounter[Tensor] = BinaryCounter(add_)
        for chunk, partial_sum in zip(self.local_chunks, partials, strict=True):
            counter.push(chunk, partial_sum)
        return counter.pop_pieces()


@final
class _SingleForward:
    """A ForwardGroup with a single forward pass."""

    def __init__(self, region: Region) -> None:
        self.num_forwards, self.local_indices, self.in_progress = 1, range(1), True
        self._region = region

    def enter(self, region: Region, call: partial[Any]) -> None:
        """See ForwardGroup."""

    def exchange(self, label: str, joint_function: Callable[[Sequence[Any]], Sequence[Any]], inputs: Any) -> Any:
        """See ForwardGroup."""
        return joint_function([inputs])[0]

    def all_gather(self, local_tensors: Sequence[Tensor]) -> list[Tensor]:
        """See ForwardGroup. Returns contiguous tensors, like a real gather, because strides can change the bits."""
        return [tensor.contiguous() for tensor in local_tensors]

    def reduce_scatter(self, partial_sums: Sequence[Mapping[LeafBlock, Tensor]], num_chunks: int) -> list[Tensor]:
        """See ForwardGroup."""
        return [self._region.sum_pieces(pieces_of_forward) for pieces_of_forward in partial_sums]


@dataclass(eq=False)
class _RegionCall:
    """The state of a call of a region: its RNG, its first layers' outputs and its last layer's inputs."""

    rng: "ChunkRng"
    outputs: dict[nn.Module, Sequence[Tensor]] = field(default_factory=dict)  # for all chunks of this rank
    inputs: list[Tensor] = field(default_factory=list)
    chunk_index: int = 0  # the local index of the current chunk


class _RegionCalls(threading.local):
    """The region call in progress on this thread. Interleaved forward passes run on separate threads."""

    active: _RegionCall | None = None

    def __reduce__(self) -> "tuple[type[_RegionCalls], tuple[()]]":
        """Allow deep copies of a model, in which no call is in progress."""
        return _RegionCalls, ()


class ChunkDone(BaseException):
    """Raised to end the execution of a region for one chunk.

    A BaseException, so that user code with `except Exception` doesn't catch it.
    """


@final
class ChunkRng:
    """Seeds the default random number generators for each chunk of a region.

    Between the first layers and the last layer of a region, the generators are seeded with `key` and the chunk index.
    The key is drawn from the generators at the start of the first chunk. After the last layer, the generators are
    restored to their states from right after this draw.
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
        """Seed the generators for a chunk, unless this chunk has already begun."""
        if chunk != self._seeded_chunk:
            self._seeded_chunk = chunk
            self.seed_chunk(self.key, chunk)

    @property
    def key(self) -> int:
        """The key from which the seeds of all chunks are derived. Drawn on first access."""
        if self._key is None:
            self._key = int(torch.randint(1 << 62, (), generator=torch.default_generator, device="cpu"))
            self._states_after_key = self._get_states()
        return self._key

    def seed_chunk(self, key: int, chunk: int) -> None:
        """Seed the generators with a seed that is derived from `key` and `chunk`."""
        for generator in self._generators:
            generator.manual_seed(random.make_torch_seed(random.extend_key(key, chunk)))

    def rewind(self) -> None:
        """Restore the generator states from before the key was drawn, so that the next call draws the same numbers."""
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
