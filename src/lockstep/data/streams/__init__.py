"""Iterable datasets whose shards are known, as map-style datasets: their index, and the readers of the shards."""
