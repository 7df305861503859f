"""Checkpoints: hashed and signed folders that are complete or absent, in the format of a single process."""
