"""Repeats a step of a run on any placement, to check that it is the same and to examine it."""
