"""Ranks as threads of one process, which send each other tensors through its memory: hundreds of them need no gloo."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.comm.canonical import CanonicalSum, add_
from lockstep.comm.carrier import AddressedTensor, Carrier, renumber_ranks
from lockstep.core import tree
from lockstep.core.mesh import Axis, Mesh
from lockstep.core.tree import LeafBlock

PATIENCE_S = 120.0
Leaf = Callable[[int], Tensor]  # makes the value of a leaf, anew each time


class Arriving(NamedTuple):
    """A transfer under way: the tensors that come, each from its queue."""

    tensors: list[tuple[Tensor, "SimpleQueue[Tensor]"]]

    def wait(self) -> None:
        for tensor, queue in self.tensors:
            tensor.copy_(queue.get(timeout=PATIENCE_S))


class Post:
    """What carries tensors between so many ranks, and counts what each sends and receives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.pairs: set[tuple[int, int]] = set()
        self._queues: dict[tuple[int, int], SimpleQueue[Tensor]] = {}

    def neighbors(self) -> int:
        """Return the largest number of others that a rank has talked to."""
        return max(Counter(end for pair in {(min(pair), max(pair)) for pair in self.pairs} for end in pair).values())

    def carrier(self, rank: int) -> Carrier:
        def start(sent: Sequence[AddressedTensor], received: Sequence[AddressedTensor]) -> Any:
            for tensor, peer in sent:
                self.sent[rank] += len(tensor)
                self.pairs.add((rank, peer))
                self._queue(rank, peer).put(tensor.clone())
            self.received[rank] += sum(len(tensor) for tensor, _ in received)
            return Arriving([(tensor, self._queue(peer, rank)) for tensor, peer in received])

        return start

    def run(self, function: Callable[[int, Carrier], Any]) -> list[Any]:
        """Call a function on each rank, and return what it returns, by rank."""
        with ThreadPoolExecutor(self.size) as threads:
            return [*threads.map(lambda rank: function(rank, self.carrier(rank)), range(self.size))]

    def _queue(self, source: int, target: int) -> "SimpleQueue[Tensor]":
        return self._queues.setdefault((source, target), SimpleQueue())


def held(numbers: Iterable[int], leaf: Leaf) -> dict[LeafBlock, Tensor]:
    """Return what a rank with these leaves is left with once it has added what it can."""
    counter = tree.BinaryCounter(add_)
    for number in numbers:
        counter.push(number, leaf(number))
    return counter.pop_pieces()


def summed(mesh: Mesh, axes: Sequence[Axis], leaves: int, leaf: Leaf, chunks: int = 1) -> tuple[list[Tensor], Post]:
    """Return the sum along these axes as each rank has it, and what the ranks sent each other."""
    places, order = mesh.get_data_ranks_along(*axes)
    post = Post(len(order))

    def added(rank: int, carrier: Carrier) -> Tensor:
        place = order.index(rank)
        blocks = places[place].get_own_blocks(leaves, chunks)
        pieces = {block: held(range(block.first, block.first + block.size), leaf)[block] for block in blocks}
        return CanonicalSum(place, places, renumber_ranks(carrier, order), chunks)(pieces, leaves, leaf(0))

    return post.run(added), post
