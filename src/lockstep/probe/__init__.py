"""Checks for user code that makes the results depend on the placement."""
