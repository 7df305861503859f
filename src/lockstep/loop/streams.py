"""Opens iterable datasets in a custom loop. Each rank indexes some of the shards, and all ranks share the indexes."""

from typing import Any, Final, final
from weakref import WeakKeyDictionary

from lockstep.comm.world import World
from lockstep.data.items import preserve_rng_states
from lockstep.data.streams.find import find_shards
from lockstep.data.streams.index import ShardIndex
from lockstep.data.streams.sharded import ShardedDataset, Shards

_SAME_SHARDS: Final = "pass the same shards on every rank, because run.steps distributes the samples"


@final
class Streams:
    """Opens the streams of a run. If the script passes a stream again, it isn't indexed again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._opened: WeakKeyDictionary[Any, ShardedDataset] = WeakKeyDictionary()

    def open(self, dataset: Any) -> Any:
        """Return a map-style dataset for an iterable dataset whose shards are known, and any other object unchanged.

        All ranks must call this method. Raises UsageError if the dataset has a stage that Lockstep can't apply to one
        sample at a time, or if a shard can't be read.
        """
        shards = find_shards(dataset)
        if shards is None:
            return dataset
        opened = self._opened.get(dataset)
        if opened is None:
            with preserve_rng_states():  # indexing calls functions of the user, which may draw random numbers
                opened = self._opened[dataset] = self._index_shards(shards, dataset)
        return opened

    def _index_shards(self, shards: Shards, dataset: Any) -> ShardedDataset:
        world, count = self._world, len(shards.names)
        world.compare({f"{shards.label}: its shards": [*shards.names]}, _SAME_SHARDS)
        own = range(world.rank, count, world.size)
        with world.without_timeout():
            values = {number: shards.index_shard(number).to_json() for number in own}
        merged = {int(number): value for part in world.all_gather_json(values) for number, value in part.items()}
        indexes = [ShardIndex.from_json(merged[number]) for number in range(count)]
        return ShardedDataset(shards, indexes, dataset, locally_indexed=own)
