"""Repeats steps of a run on any placement, to check that the results are the same and to examine them."""
