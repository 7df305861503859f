"""Custom training loops, which the user writes: the run, its steps, and the checks around the model."""
