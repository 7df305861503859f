"""Configurations of other frameworks, read as ours, with what became of each of their keys."""
