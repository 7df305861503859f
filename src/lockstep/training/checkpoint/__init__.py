"""Checkpoints: folders that are complete or absent, with the names of a single process, hashed and signed."""
