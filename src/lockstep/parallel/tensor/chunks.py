"""The chunks of features into which a recipe cuts a part of a model, and how they are computed one by one.

Shoeybi et al. 2019, "Megatron-LM", section 3: a layer whose outputs are cut needs no exchange, one whose inputs are cut
gives partial sums. What is ours is the unit. The model's code between such a pair of layers, a *region*, is called once
for each chunk, by whoever computes it: products, activations, attention and dropout have the shape and the random
numbers of one chunk. The partial sums are added by the tree (core/tree.py), within a rank and then over the ranks of
the mesh's tensor axis. So the number of these ranks changes no bit.

A region goes like this, for a rank with chunks 2 and 3:

1. The region is called for chunk 2. Its first layers (`ColumnLinear`) compute the outputs of both chunks, and give
   those of 2. From here on the generators are chunk 2's.
2. At its last layer (`RowLinear`) the call ends: the layer keeps what it is given.
3. The region is called for chunk 3, and its first layers give what they have of 3.
4. Its last layer has all chunks of this rank now. It gives their sum over all ranks, the generators go on from where
   they were before step 1, and the rest of the region is computed once.
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
    """The `count` forwards that go through a region together, of which `own` are this rank's.

    They are one, or the chunks of a sequence where ranks share sequences outside of regions (sequence_parallel.py).
    """

    @property
    def count(self) -> int: ...

    @property
    def own(self) -> range: ...

    @property
    def under_way(self) -> bool: ...

    def enter(self, chunks: "Region", call: partial[Any]) -> None:
        """Call before a region is called for a forward of this rank's, so that others can be called for it, too."""

    def exchange(self, place: str, joint: Callable[[Sequence[Any]], Sequence[Any]], given: Any) -> Any:
        """Return one forward's part of what `joint` makes of what all of them give."""

    def gather(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return what each forward has, given what those of this rank have: tensors of one shape."""

    def scatter(self, pieces: Sequence[Mapping[LeafBlock, Tensor]], chunks: int) -> list[Tensor]:
        """Return the sum over all `chunks` of a region for each forward of this rank's, given its pieces for all."""


@final
class Region:
    """The `count` chunks of a region, of which this rank computes `own`: until `share` is called, all."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self.own = range(count)
        self.name = name
        self._across = CanonicalSum(0, [DataRank()], None)
        self.visited: Forwards | None = None
        self._alone = _OneForward(self)
        self._calls = _RegionCalls()

    def share(self, rank: int, ranks: int, across: CanonicalSum) -> None:
        """Leave the chunks of other ranks to them: this one is `rank` of `ranks`, over which `across` adds."""
        self.own = part(self.count, ranks, rank)
        self._across = across

    def before(self, call: partial[Any]) -> None:
        """Call a region for all chunks but the last, for which it is called after this."""
        self.forwards.enter(self, call)
        self._call(call, len(self.own) - 1)

    def visit(self, call: partial[Any]) -> None:
        """Call a region for all chunks in the place of a forward that another rank computes (sequence_parallel.py)."""
        self._call(call, len(self.own))

    def _call(self, call: partial[Any], times: int) -> None:
        now = self._calls.now = _RegionCall(Draws())
        for number in range(times):
            now.current = number
            try:
                call()
            except ChunkDone:
                now.draws.rewind()
            else:
                raise RuntimeError(f"{self.name} was called and its rowwise layer was not: it cannot be cut")
        now.current = len(self.own) - 1

    @property
    def forwards(self) -> Forwards:
        """The forwards that go through the region together."""
        return self.visited if self.visited is not None and self.visited.under_way else self._alone

    @property
    def computing(self) -> bool:
        """Whether a call of the region is under way, from its first layers to its last."""
        return self._calls.now is not None

    def begin(self, layer: nn.Module, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the part of the chunk that is computed of what `compute` gave when `layer` was called for the first.

        It gives all parts of this rank's chunks, chunk by chunk: as many tensors for each.
        """
        now = self._calls.now
        if now is None:
            raise RuntimeError(f"a layer of {self.name} was called from elsewhere: it cannot be cut")
        if layer not in now.made:
            now.made[layer] = compute()
        if layer.training:
            now.draws.for_chunk(self.own[now.current])
        count = len(now.made[layer]) // len(self.own)
        return now.made[layer][now.current * count : (now.current + 1) * count]

    def gather(self, given: Tensor) -> list[Tensor]:
        """Return what the last layer was given for all of this rank's chunks; a call before the last one ends here."""
        now = self._calls.now
        if now is None:
            raise RuntimeError(f"the rowwise layer of {self.name} was called from elsewhere: it cannot be cut")
        now.given.append(given)
        if now.current < len(self.own) - 1:
            raise ChunkDone
        now.draws.go_on()
        del self._calls.now
        return now.given

    def each(self, training: bool) -> Iterator[tuple[int, int]]:
        """Yield place and number of each chunk of this rank, which draws numbers of its own in training."""
        draws = Draws()
        for at, chunk in enumerate(self.own):
            if training:
                draws.for_chunk(chunk)
            yield at, chunk
        draws.go_on()

    def rows(self, length: int) -> list[range]:
        """Return which of `length` rows are in each chunk of this rank, where `length` need be no multiple of all."""
        return [part(length, self.count, chunk) for chunk in self.own]

    def of_all(self, own: Tensor) -> Tensor:
        """Return what all chunks have, by their numbers along dim 0, given what this rank's have. All ranks call it."""
        return self._across.side_by_side(own).flatten(0, 1)

    def total(self, partials: Iterable[Tensor]) -> Tensor:
        """Return the sum over all chunks of tensors of one shape; those of this rank's may be overwritten.

        One is asked for after the other, so that few are there at a time. All ranks that share the chunks call it in
        the same order.
        """
        return self.add(self.pieces(partials))

    def add(self, pieces: Mapping[LeafBlock, Tensor]) -> Tensor:
        """Return the sum over all chunks, of which this rank has these pieces."""
        like = next(iter(pieces.values()))
        flat = {block: piece.reshape(-1) for block, piece in pieces.items()}
        return self._across(flat, self.count, like.reshape(-1)).view(like.shape)

    def pieces(self, partials: Iterable[Tensor]) -> dict[LeafBlock, Tensor]:
        """Return what this rank can add by itself of such a sum, by the blocks of the tree."""
        counter: Counter[Tensor] = Counter(add_)
        for chunk, each in zip(self.own, partials, strict=True):
            counter.push(chunk, each)
        return counter.pieces()


@final
class _OneForward:
    """A forward by itself, which has nothing to gather."""

    def __init__(self, chunks: Region) -> None:
        self.count, self.own, self.under_way = 1, range(1), True
        self._chunks = chunks

    def enter(self, chunks: Region, call: partial[Any]) -> None:
        """See Forwards."""

    def exchange(self, place: str, joint: Callable[[Sequence[Any]], Sequence[Any]], given: Any) -> Any:
        """See Forwards."""
        return joint([given])[0]

    def gather(self, own: Sequence[Tensor]) -> list[Tensor]:
        """See Forwards. A kernel may give other bits for elements that are elsewhere in memory than gathered ones."""
        return [each.contiguous() for each in own]

    def scatter(self, pieces: Sequence[Mapping[LeafBlock, Tensor]], chunks: int) -> list[Tensor]:
        """See Forwards."""
        return [self._chunks.add(each) for each in pieces]


@dataclass(eq=False)
class _RegionCall:
    """A call of a region: its random numbers, what is made by its first layers, and what is given to its last."""

    draws: "Draws"
    made: dict[nn.Module, Sequence[Tensor]] = field(default_factory=dict)  # for all chunks of this rank
    given: list[Tensor] = field(default_factory=list)
    current: int = 0  # which of this rank's chunks is being computed


class _RegionCalls(threading.local):
    """The call that is under way: one for each forward of those that have a thread each (parallel/cooperative.py)."""

    now: _RegionCall | None = None

    def __reduce__(self) -> "tuple[type[_RegionCalls], tuple[()]]":
        """Let a model be copied: of its copy no call is under way."""
        return _RegionCalls, ()


class ChunkDone(BaseException):
    """Ends a call of a region. No Exception: the region's own code may catch those."""


@final
class Draws:
    """The random numbers of a region: before its first layers and after its last they are those of the whole.

    In between a chunk draws by its number and `key`, which is drawn where the first of them begins.
    """

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._before = self._states()
        self._after: list[Tensor] = []
        self._key: int | None = None
        self._drawing: int | None = None

    def for_chunk(self, chunk: int) -> None:
        """Give a chunk its own numbers from here on, if it has not had them in this call."""
        if chunk != self._drawing:
            self._drawing = chunk
            self.draw_by(self.key, chunk)

    @property
    def key(self) -> int:
        """What the chunks of this call draw by."""
        if self._key is None:
            self._key = int(torch.randint(1 << 62, (), generator=torch.default_generator, device="cpu"))
            self._after = self._states()
        return self._key

    def draw_by(self, key: int, chunk: int) -> None:
        """Give a chunk the numbers that it has with this key."""
        for generator in self._generators:
            generator.manual_seed(random.torch_seed(random.extend_key(key, chunk)))

    def rewind(self) -> None:
        """Draw again what was drawn before the first layers."""
        self._set(self._before)

    def go_on(self) -> None:
        """Draw on as if the chunks had drawn nothing."""
        if self._after:
            self._set(self._after)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
