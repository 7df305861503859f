"""Repeats steps of a run on any placement, to check that the results match the run, and to examine the steps."""
