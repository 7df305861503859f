"""Checks whether anything in the user's code makes the numbers depend on the placement."""
