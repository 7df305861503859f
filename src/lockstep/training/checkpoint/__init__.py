"""Checkpoints: folders that are whole or absent, with the names of one process, hashed and signed."""
