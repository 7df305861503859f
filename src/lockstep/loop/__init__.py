"""Custom training loops: the run and its steps, for a loop that the user writes, and checks of the user's code."""
