"""A step of a run done again, on any placement: whether it is the same, and what happened in it."""
