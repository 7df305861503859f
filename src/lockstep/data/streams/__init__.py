"""Converts iterable datasets with known shards to map-style datasets, by indexing the samples of each shard."""
