"""Finds the shards of an iterable dataset, and opens it as a map-style dataset."""

from typing import Any

from lockstep.data.streams.hugging_face import open_hugging_face_shards
from lockstep.data.streams.sharded import ShardedDataset, Shards
from lockstep.data.streams.webdataset import open_webdataset_shards


def find_shards(dataset: Any) -> Shards | None:
    """Return the shards of a Hugging Face IterableDataset or a WebDataset, or None for any other object.

    Raises UsageError if the dataset has a stage whose result for a sample depends on other samples.
    """
    return open_hugging_face_shards(dataset) or open_webdataset_shards(dataset)


def open_stream(dataset: Any) -> Any:
    """Index the shards of an iterable dataset in this process, and return a map-style dataset.

    Any other object is returned unchanged.
    """
    shards = find_shards(dataset)
    if shards is None:
        return dataset
    return ShardedDataset(shards, [shards.index_shard(number) for number in range(len(shards.names))], dataset)
