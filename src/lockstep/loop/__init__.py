"""Training loops written by the user: the run, its steps, and the guards around the model."""
