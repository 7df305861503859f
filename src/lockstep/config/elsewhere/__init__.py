"""Configurations of other frameworks, read as ours: what became of each of their keys is written beside it."""
